"""What was asked, validated: everything that can be refused without reading a checkpoint is refused here.

Values may arrive as the text of a command line ("50") or as Python numbers; a refusal names the flag either way.
"""

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from kimik3_cli.errors import RequestError

Mode = Literal["greedy", "sample"]
Precision = Literal["fp32", "bf16"]
Backend = Literal["chunkwise", "fused"]
MAX_SEED = 2**63
MOST_THREADS = 1024
MAX_DIGITS = 18
SHOWN_CHARACTERS = 60
OUTPUT_SUFFIXES = (".npy", ".safetensors", ".pt")
ARGUMENTS = ("path", "src", "dst")  # without a flag
DEVICE_NAMES = re.compile(r"auto|cpu|cuda(:[0-9]+)?")


def check_sampling(mode: str, temperature: float, top_k: int, top_p: float, seed: int = 0) -> None:
    """Refuse sampling values outside their range; greedy mode ignores them.

    Raises:
        RequestError: naming the value and its range.
    """
    if mode not in ("greedy", "sample"):
        raise RequestError(f"--mode is {mode!r}; give greedy or sample")
    if mode == "greedy":
        return
    _check_numbers(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    if not (math.isfinite(temperature) and temperature > 0):
        raise RequestError(f"--temperature is {temperature}; give a finite value above 0, or --mode greedy")
    if top_k < 1:
        raise RequestError(f"--top-k is {top_k}; give 1 or more")
    if not 0 < top_p <= 1:
        raise RequestError(f"--top-p is {top_p}; give a value above 0 and at most 1")
    if not 0 <= seed < MAX_SEED:
        raise RequestError(f"--seed is {seed}; give a value from 0 to 2^63 - 1")


def _check_numbers(**values: object) -> None:
    for name, value in values.items():
        kinds = (int,) if name in ("top_k", "seed") else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            kind = "an integer" if kinds == (int,) else "a number"
            raise RequestError(f"--{name.replace('_', '-')} is {value!r}; give {kind}")


def parse_token_ids(text: str) -> list[int]:
    """Read '7, 13,29' as [7, 13, 29].

    Raises:
        RequestError: naming the field that is not a non-negative decimal integer.
    """
    fields = [field.strip() for field in text.split(",")]
    for field in fields:
        if not (field.isascii() and field.isdigit() and len(field) <= MAX_DIGITS):
            raise RequestError(
                f"--token-ids holds {_shown(field)}; give comma-separated non-negative integers such as 7,13,29"
            )
    return [int(field) for field in fields]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


def _token_ids(value: object) -> object:
    return parse_token_ids(value) if isinstance(value, str) else value


def _whole_number(value: object) -> object:
    """Keep pydantic from reading True, 7.0 and "7.0" as integers."""
    if isinstance(value, (bool, float)) or (isinstance(value, str) and not re.fullmatch(r"[+-]?[0-9]+", value.strip())):
        raise ValueError("give a whole number")
    return value


def _path(value: object) -> object:
    if value == "":
        raise ValueError("give the name of a file")
    return value


def _device(value: object) -> object:
    if not (isinstance(value, str) and DEVICE_NAMES.fullmatch(value)):
        raise ValueError("give auto, cpu, cuda or cuda:N")
    return value


def _text(value: object) -> object:
    """Refuse what no tokenizer can read: bytes of the command line that are not UTF-8 arrive as lone surrogates."""
    if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("give valid UTF-8 text")
    if value == "":
        raise ValueError("give at least one character")
    return value


WholeNumber = Annotated[int, BeforeValidator(_whole_number)]
FilePath = Annotated[Path, BeforeValidator(_path)]
Device = Annotated[str, BeforeValidator(_device)]
Text = Annotated[str, BeforeValidator(_text)]


class Request(BaseModel):
    """Base of all requests: frozen, closed."""

    # defer_build: a command pays at start for its own request, not for all
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    @classmethod
    def build(cls, **values: Any) -> Self:
        """Validate the values of one request.

        Raises:
            RequestError: the first value that is wrong, by the name of its flag.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            raise _refusal(error.errors()[0]) from None


def _refusal(first: Any) -> RequestError:
    """Turn pydantic's first finding into a sentence: flag, value, remedy."""
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, RequestError):
        return cause
    remedies = {
        "value_error": str(cause),
        "int_parsing_size": "give a smaller number",
        "float_parsing": "give a number",
        "literal_error": f"give {first.get('ctx', {}).get('expected')}".replace("'", ""),
    }
    name = str(first["loc"][0])
    flag = name.upper() if name in ARGUMENTS else "--" + name.replace("_", "-")
    return RequestError(f"{flag} is {_shown(first['input'])}; {remedies.get(first['type'], first['msg'])}")


class ModelRequest(Request):
    """Which model, where it runs, and the prompt: exactly one of text and token ids."""

    checkpoint: FilePath
    device: Device = "auto"
    backend: Backend | None = None
    precision: Precision = "fp32"
    pad_id: WholeNumber | None = None
    prompt: Text | None = None
    token_ids: Annotated[list[WholeNumber], BeforeValidator(_token_ids)] | None = None
    tokenizer: Text | None = None
    tokenizer_revision: Text | None = None
    local_files_only: bool = False
    trust_remote_code: bool = False
    allow_vocab_padding: bool = False
    max_seq_len: WholeNumber | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.prompt is None) == (self.token_ids is None):
            count = "neither" if self.prompt is None else "both"
            raise RequestError(f"{count} of --prompt and --token-ids given; give exactly one")
        if self.token_ids is not None and not self.token_ids:
            raise RequestError("--token-ids is empty; give at least one token id")
        if self.max_seq_len is not None and self.max_seq_len < 1:
            raise RequestError(f"--max-seq-len is {self.max_seq_len}; give 1 or more")
        if self.pad_id is not None and self.pad_id < 0:
            raise RequestError(f"--pad-id is {self.pad_id}; give a token id, 0 or more")
        return self


class GenerateRequest(ModelRequest):
    """`kimik3 generate`."""

    max_new_tokens: WholeNumber = 32
    mode: Mode = "greedy"
    temperature: float = 1.0
    top_k: WholeNumber = 50
    top_p: float = 1.0
    seed: WholeNumber = 0
    eos_id: WholeNumber | None = None
    no_cache: bool = False

    @model_validator(mode="after")
    def _ranges(self) -> Self:
        if self.max_new_tokens < 1:
            raise RequestError(f"--max-new-tokens is {self.max_new_tokens}; give 1 or more")
        if self.eos_id is not None and self.eos_id < 0:
            raise RequestError(f"--eos-id is {self.eos_id}; give a token id, 0 or more")
        check_sampling(self.mode, self.temperature, self.top_k, self.top_p, self.seed)
        return self


class LogitsRequest(ModelRequest):
    """`kimik3 logits`."""

    top: WholeNumber = 10
    full: bool = False
    output: FilePath | None = None

    @model_validator(mode="after")
    def _ranges(self) -> Self:
        if self.top < 1:
            raise RequestError(f"--top is {self.top}; give 1 or more")
        if self.output is not None:
            _check_output(self.output)
        return self


def _check_output(path: Path) -> None:
    if path.suffix not in OUTPUT_SUFFIXES:
        raise RequestError(f"--output is {str(path)!r}; give a name that ends in {', '.join(OUTPUT_SUFFIXES)}")
    if not path.parent.is_dir():
        raise RequestError(f"--output is {str(path)!r}; the folder {str(path.parent)!r} does not exist")
    if path.is_dir():
        raise RequestError(f"--output is {str(path)!r}, which is a folder; give the name of a file")


class InspectRequest(Request):
    """`kimik3 inspect-checkpoint`."""

    path: FilePath
    tensors: bool = False
    deep: bool = False


class ConvertRequest(Request):
    """`kimik3 convert`."""

    src: FilePath
    dst: FilePath
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    overwrite: bool = False

    @model_validator(mode="before")
    @classmethod
    def _slash(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Refuse the name of a directory for a file; a `Path` no longer has the slash."""
        dst, src = values.get("dst"), values.get("src")
        if isinstance(dst, str) and dst.endswith("/") and isinstance(src, str | Path) and Path(src).is_dir():
            raise RequestError(f"DST is {dst!r}, a directory by its slash, but SRC is a directory: name a file")
        return values


def _lengths(value: object) -> object:
    """Read '128,512' as [128, 512]."""
    if not isinstance(value, str):
        return value
    fields = [field.strip() for field in value.split(",")]
    if not all(re.fullmatch(r"[1-9][0-9]{0,8}", field) for field in fields):
        raise ValueError("give comma-separated lengths, 1 or more, such as 128,512")
    return [int(field) for field in fields]


class BenchRequest(Request):
    """`kimik3 bench`."""

    checkpoint: FilePath
    random: str | None = None
    device: Device = "auto"
    backend: Backend | None = None
    precision: Precision = "fp32"
    max_seq_len: WholeNumber | None = None
    prompt_tokens: Annotated[list[WholeNumber], BeforeValidator(_lengths)] | None = None
    new_tokens: WholeNumber = 64
    repeats: WholeNumber = 5
    threads: WholeNumber | None = None
    no_cache: bool = False

    @model_validator(mode="after")
    def _ranges(self) -> Self:
        for flag, value in (
            ("--new-tokens", self.new_tokens),
            ("--repeats", self.repeats),
            ("--threads", self.threads),
            ("--max-seq-len", self.max_seq_len),
        ):
            if value is not None and value < 1:
                raise RequestError(f"{flag} is {value}; give 1 or more")
        if self.threads is not None and self.threads > MOST_THREADS:
            raise RequestError(f"--threads is {self.threads}; give at most {MOST_THREADS}")
        return self
