"""What is answered: one pydantic model for each JSON object of the contract.

Field order is print order. A field that does not apply is left unset and therefore absent from the JSON; a field that
was set to None is printed as null.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Result(BaseModel):
    """Base of all results: frozen, closed, dumped as JSON with exactly the fields that were set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def to_json(self) -> str:
        """Return the canonical output: indent 2, characters unescaped, only the fields that were set."""
        return self.model_dump_json(indent=2, exclude_unset=True, by_alias=True)


class CheckpointInfo(Result):
    """The checkpoint that answered."""

    path: str
    format_version: int
    step: int | None = Field(description="the trainer's step; null when the file has none")
    training_kda_backend: str
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
    """One entry of the trainer state, which inference never reads."""

    name: str = Field(description="dotted path of keys inside the file")
    kind: str = Field(description="a Python type name, or dtype and shape of a tensor")
    bytes: int = Field(description="bytes of its tensors; 0 for plain values")
    value: int | float | bool | str | None = Field(default=None, description="only for plain numbers and strings")


class MemoryNeeds(Result):
    """Bytes that inference needs, weights and state in float32."""

    weights_bytes: int
    cache_bytes_fixed: int = Field(description="recurrent states and convolution tails of one sequence")
    cache_bytes_per_token: int = Field(description="MLA latents of one token of context")


class Problem(Result):
    """One thing that is wrong with the file."""

    kind: Literal["missing", "unexpected", "shape", "dtype", "tie", "config", "checksum", "non_finite"]
    name: str = Field(description="tensor or configuration key")
    message: str


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
    format_version: int
    config: dict[str, Any] = Field(serialization_alias="model_config", description="as stored, defaults filled in")
    training_kda_backend: str
    step: int | None
    stripped_prefix: str = Field(description="prefix that every tensor name carried, e.g. module.; empty when none")
    tokenizer: TokenizerEntry | None
    parameters: ParameterCounts
    dtypes: list[DtypeUse]
    bytes: int = Field(description="bytes of the model's tensors in the file")
    tied_embeddings: bool
    trainer_state: list[TrainerEntry]
    memory: MemoryNeeds
    problems: list[Problem]
    tensors: list[TensorInfo] = Field(default=[], description="only with --tensors")
    records_verified: int = Field(default=0, description="only with --deep: records whose checksum was compared")
