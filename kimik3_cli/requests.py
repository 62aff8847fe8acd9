"""What was asked, validated: everything that can be refused without reading a checkpoint is refused here."""

import math
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from kimik3_cli.errors import RequestError

Mode = Literal["greedy", "sample"]
Precision = Literal["fp32", "bf16"]
Backend = Literal["chunkwise", "fused"]
MAX_SEED = 2**63
OUTPUT_SUFFIXES = (".npy", ".safetensors", ".pt")


def check_sampling(mode: str, temperature: float, top_k: int, top_p: float, seed: int = 0) -> None:
    """Refuse sampling values outside their range; greedy mode ignores them.

    Raises:
        RequestError: naming the value and its range.
    """
    if mode not in ("greedy", "sample"):
        raise RequestError(f"--mode is {mode!r}; give greedy or sample")
    if mode == "greedy":
        return
    if not (math.isfinite(temperature) and temperature > 0):
        raise RequestError(f"--temperature is {temperature}; give a finite value above 0, or --mode greedy")
    if top_k < 1:
        raise RequestError(f"--top-k is {top_k}; give 1 or more")
    if not 0 < top_p <= 1:
        raise RequestError(f"--top-p is {top_p}; give a value above 0 and at most 1")
    if not 0 <= seed < MAX_SEED:
        raise RequestError(f"--seed is {seed}; give a value from 0 to 2^63 - 1")


def parse_token_ids(text: str) -> list[int]:
    """Read '7, 13,29' as [7, 13, 29].

    Raises:
        RequestError: naming the field that is not a non-negative decimal integer.
    """
    ids = []
    for field in text.split(","):
        digits = field.strip()
        if not (digits.isascii() and digits.isdigit()):
            raise RequestError(
                f"--token-ids holds {field!r}; give comma-separated non-negative integers such as 7,13,29"
            )
        ids.append(int(digits))
    return ids


class Request(BaseModel):
    """Base of all requests: frozen, closed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def build(cls, **values: Any) -> Self:
        """Validate the values of one request.

        Raises:
            RequestError: the first value that is wrong, by the name of its flag.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            refusal = first.get("ctx", {}).get("error")
            if isinstance(refusal, RequestError):
                raise refusal from None
            flag = "--" + str(first["loc"][0]).replace("_", "-")
            raise RequestError(f"{flag} is {first['input']!r}; {first['msg'].lower()}") from None


class ModelRequest(Request):
    """Which model, where it runs, and the prompt: exactly one of text and token ids."""

    checkpoint: Path
    device: str = "auto"
    backend: Backend | None = None
    precision: Precision = "fp32"
    pad_id: int | None = None
    prompt: str | None = None
    token_ids: list[int] | None = None
    tokenizer: str | None = None
    tokenizer_revision: str | None = None
    local_files_only: bool = False

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.prompt is None) == (self.token_ids is None):
            count = "neither" if self.prompt is None else "both"
            raise RequestError(f"{count} of --prompt and --token-ids given; give exactly one")
        if self.prompt == "":
            raise RequestError("--prompt is empty; give at least one character")
        if self.pad_id is not None and self.pad_id < 0:
            raise RequestError(f"--pad-id is {self.pad_id}; give a token id, 0 or more")
        return self


class GenerateRequest(ModelRequest):
    """`kimik3 generate`."""

    max_new_tokens: int = 32
    mode: Mode = "greedy"
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 0
    eos_id: int | None = None

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

    top: int = 10
    full: bool = False
    output: Path | None = None

    @model_validator(mode="after")
    def _ranges(self) -> Self:
        if self.top < 1:
            raise RequestError(f"--top is {self.top}; give 1 or more")
        if self.output is not None and self.output.suffix not in OUTPUT_SUFFIXES:
            raise RequestError(
                f"--output is {str(self.output)!r}; give a name that ends in {', '.join(OUTPUT_SUFFIXES)}"
            )
        return self


class InspectRequest(Request):
    """`kimik3 inspect-checkpoint`."""

    path: Path
    tensors: bool = False
    deep: bool = False
