"""What is answered: one pydantic model for each JSON object of the contract.

Field order is print order. A field that does not apply is left unset and therefore absent from the JSON; a field that
was set to None is printed as null.
"""

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Result(BaseModel):
    """Base of all results: frozen, closed, dumped as JSON with exactly the fields that were set."""

    # defer_build: a command pays at start for the models that it uses, not for all
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    def to_json(self) -> str:
        """Return the canonical output: indent 2, characters unescaped, only the fields that were set.

        Text that is not valid Unicode (a file name in another encoding) passes through as it is.
        """
        return json.dumps(self._plain(), indent=2, ensure_ascii=False, allow_nan=False)

    def to_json_line(self) -> str:
        """Return the same on one line without spaces, for one object a line."""
        return json.dumps(self._plain(), separators=(",", ":"), ensure_ascii=False, allow_nan=False)

    def _plain(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True, by_alias=True)


class CheckpointInfo(Result):
    """The checkpoint that answered."""

    path: str
    format_version: int | None = Field(description="7; null for a Hugging Face directory")
    step: int | None = Field(description="the trainer's step; null when the file has none")
    training_kda_backend: str | None = Field(description="null when a directory does not say")
    inference_kda_backend: str
    parameters: int = Field(description="number of parameters, a tied head counted once")
    vocab_size: int
    max_seq_len: int


class GenerateResult(Result):
    """Answer of `kimik3 generate`."""

    checkpoint: CheckpointInfo
    device: str
    precision: str
    prompt_token_ids: list[int]
    generated_token_ids: list[int] = Field(description="new tokens only, an EOS that ended the text included")
    finish_reason: Literal["eos", "length"]
    generated_text: str = Field(
        default="", description="text mode only: the new ids decoded with special tokens skipped"
    )


class StreamPiece(Result):
    """A line of `kimik3 generate --stream`, one for each new token; the last line is a GenerateResult instead."""

    token_id: int
    text: str = Field(
        default="",
        description="text mode only: what this token has made certain of generated_text, empty while it ends inside a "
        "character; all texts together are generated_text",
    )


class TopToken(Result):
    """One candidate for the next token."""

    token_id: int
    logit: float
    logprob: float = Field(description="natural logarithm of the probability")
    text: str = Field(default="", description="only with a tokenizer")


class LogitsResult(Result):
    """Answer of `kimik3 logits`."""

    checkpoint: CheckpointInfo
    device: str
    precision: str
    prompt_token_ids: list[int]
    vocab_size: int
    top: list[TopToken] = Field(description="the most likely next tokens, best first")
    logits: list[float] = Field(default=[], description="only with --full: the whole vector, indexed by token id")
    output: str = Field(default="", description="only with --output: the file that holds the whole vector")


class PartCounts(Result):
    """Parameters of each part of the model; the parts add up to the total."""

    embedding: int
    head: int = Field(description="0 when tied to the embedding")
    kda: int
    mla: int
    dense_ffn: int
    routed_experts: int
    shared_experts: int
    routing: int = Field(description="router, its bias, latent projections and their norm")
    norms: int = Field(description="layer norms, residual mixing, final norm")


class ParameterCounts(Result):
    """Parameter counts of the model."""

    total: int = Field(description="a tied head counted once")
    active: int = Field(description="per token: total less the input embedding less the experts not chosen")
    parts: PartCounts


class DtypeUse(Result):
    """How much of the model is stored in one dtype."""

    dtype: str
    tensors: int
    parameters: int
    bytes: int


class TokenizerEntry(Result):
    """The tokenizer that the checkpoint names."""

    name_or_path: str
    revision: str | None


class TrainerEntry(Result):
    """One entry of the trainer state, which inference never reads.

    A container with more than 64 entries, or nested deeper than 8, is one entry with the sum of its bytes.
    """

    name: str = Field(description="dotted path of keys inside the file")
    kind: str = Field(description="a Python type name, or dtype and shape of a tensor")
    bytes: int = Field(description="bytes of its tensors and byte strings; 0 for plain values")
    value: int | float | bool | str | None = Field(
        default=None, description="only for plain numbers, strings and None; nan and inf are strings"
    )


class MemoryNeeds(Result):
    """Bytes that inference needs, weights and state in float32."""

    weights_bytes: int
    cache_bytes_fixed: int = Field(description="recurrent states and convolution tails of one sequence")
    cache_bytes_per_token: int = Field(description="MLA latents of one token of context")
    machine_bytes: int = Field(description="memory of this machine")
    fits: bool = Field(description="whether weights in float32 and the fixed part of the cache fit into it")
    advice: str = Field(default="", description="only when they do not: what would hold the model")


ProblemKind = Literal["missing", "unexpected", "shape", "dtype", "tie", "checksum", "non_finite", "shard", "duplicate"]


class Problem(Result):
    """One thing that is wrong with the file."""

    kind: ProblemKind = Field(
        description="tie: embedding and head of a tied model differ, told by their checksums; where these cannot tell "
        "(views, mixed dtypes, safetensors), by --deep. checksum and non_finite: only with --deep. shard: a file of a "
        "directory, or what its index says of a tensor. duplicate: a tensor of the model that several tensors are"
    )
    name: str = Field(description="tensor, or record of the file")
    message: str


class ShardInfo(Result):
    """One safetensors file of a directory."""

    name: str
    bytes: int
    tensors: int


class SkippedTensors(Result):
    """Tensors of a directory that a text model does not use, such as those of a vision tower."""

    tensors: int
    bytes: int


class TensorInfo(Result):
    """One tensor of the model dictionary."""

    name: str
    shape: list[int]
    dtype: str
    bytes: int


class InspectResult(Result):
    """Answer of `kimik3 inspect-checkpoint`."""

    path: str
    file_size: int = Field(description="bytes")
    format_version: int | None = Field(description="7; null for a Hugging Face directory")
    config: dict[str, Any] = Field(serialization_alias="model_config", description="as stored, defaults filled in")
    training_kda_backend: str | None = Field(description="null when a directory does not say")
    step: int | None
    stripped_prefix: str = Field(
        description="prefix that every tensor name carried, e.g. module. (in a directory, most names); empty when none"
    )
    tokenizer: TokenizerEntry | None
    parameters: ParameterCounts
    dtypes: list[DtypeUse]
    bytes: int = Field(description="bytes of the model's tensors in the file, shared ones counted once")
    tied_embeddings: bool
    trainer_state: list[TrainerEntry]
    memory: MemoryNeeds
    problems: list[Problem]
    shards: list[ShardInfo] = Field(default=[], description="only for a directory: its files that can be read")
    skipped: SkippedTensors = Field(
        default=SkippedTensors(tensors=0, bytes=0), description="only for a directory: what a text model does not use"
    )
    tensors: list[TensorInfo] = Field(default=[], description="only with --tensors")
    records_verified: int = Field(
        default=0, description="only with --deep: records whose checksum was compared; 0 when the file has none"
    )


class ConvertedFile(Result):
    """One file that was written."""

    name: str = Field(description="without its folder")
    bytes: int
    sha256: str


class ConvertResult(Result):
    """Answer of `kimik3 convert`."""

    source: str
    destination: str
    layout: Literal["format_7", "kimi_linear", "kimi_k3"] = Field(
        description="what was written: a file of format version 7, or a directory in the form of the released model"
    )
    tensors: int
    parameters: int = Field(description="a tied head counted once")
    bytes: int = Field(description="bytes of all tensors that were written")
    dtypes: list[DtypeUse]
    dropped: list[str] = Field(
        description="what the source holds and the destination cannot: trainer state by its keys; tokenizer, when its "
        "files are not on this machine; parts beside the text model, such as vision_tower"
    )
    files: list[ConvertedFile]


class Spread(Result):
    """A figure measured several times."""

    median: float
    low: float
    high: float


class MachineRates(Result):
    """What this machine can do at best, measured at the thread count of the benchmark."""

    read_bytes_per_second: float
    matrix_flops_per_second: float = Field(description="float32; a multiply-add counts 2")


class LoadFigures(Result):
    """Loading the checkpoint."""

    seconds: float
    weights_bytes: int
    peak_memory_growth_bytes: int = Field(description="peak resident memory above that before loading")


class BenchRun(Result):
    """Speed at one prompt length."""

    prompt_tokens: int
    new_tokens: int
    prefill_tokens_per_second: Spread
    prefill_fraction_of_floor: float = Field(description="1 would be the matrix rate of this machine")
    decode_ms_per_token: Spread
    decode_fraction_of_floor: float = Field(description="1 would be the memory bandwidth of this machine")
    peak_memory_bytes: int = Field(description="peak resident memory of the process so far")


class BenchResult(Result):
    """Answer of `kimik3 bench`."""

    checkpoint: str | None = Field(description="path; null for a random model")
    random: str | None = Field(description="the named size; null for a checkpoint")
    device: str
    backend: str
    precision: str
    threads: int
    cache: bool
    repeats: int
    parameters: ParameterCounts
    machine: MachineRates
    load: LoadFigures | None = Field(description="null for a random model")
    runs: list[BenchRun]


def sized(count: float) -> str:
    """Return bytes in a unit that fits: 11.1 TB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"
