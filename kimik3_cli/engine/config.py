"""KimiK3Config: the architecture of a checkpoint, strict, with the released K3 field names."""

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kimik3_cli.errors import ConfigError

# Released-config keys without meaning for text-only inference: accepted and dropped.
IGNORED_KEYS = frozenset(
    {
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "head_dim",
        "hidden_dropout",
        "initializer_range",
        "kda_mode",
        "kda_unpad_inputs",
        "kda_use_fused_gate",
        "kda_use_qk_l2norm_in_kernel",
        "max_position_embeddings",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "topk_method",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "use_grouped_topk",
    }
)
# Keys that this architecture knows with one meaning only: accepted with these values, an error otherwise.
FIXED_VALUES: dict[str, tuple[object, ...]] = {
    "mla_use_nope": (True,),
    "num_nextn_predict_layers": (0, None),
    "attention_bias": (False,),
    "quantization_config": (None,),
}
MLA_KEYS = ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
MOE_KEYS = ("num_experts_per_token", "moe_intermediate_size")
FLOAT32_BYTES = 4
SHOWN_LAYERS = 20


def _whole_number(value: object) -> object:
    """Let pydantic refuse booleans, which Python counts as integers."""
    if isinstance(value, bool):
        raise ValueError("a boolean is not a number")
    return value


def _integer(value: object) -> object:
    """Let pydantic refuse 64.0, which equals the literal 64."""
    if type(value) is not int:
        raise ValueError("it must be an integer")
    return value


NotBool = BeforeValidator(_whole_number)
Count = Annotated[int, NotBool, Field(ge=1)]
Index = Annotated[int, NotBool, Field(ge=0)]
Number = Annotated[float, NotBool, Field(allow_inf_nan=False)]
Positive = Annotated[float, NotBool, Field(gt=0, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class LinearAttnConfig(_Strict):
    """KDA: layer numbers are 1-based; `gate_lower_bound` null means the softplus gate of Kimi Linear."""

    kda_layers: list[Count]
    full_attn_layers: list[Count]
    num_heads: Count
    head_dim: Count
    short_conv_kernel_size: Count = 4
    use_full_rank_gate: bool = True
    gate_lower_bound: Annotated[float, NotBool, Field(le=0, allow_inf_nan=False)] | None = -5.0


class KimiK3Config(_Strict):
    """Everything that decides the graph of one model. Build it with `from_dict`."""

    vocab_size: Count
    hidden_size: Count
    num_hidden_layers: Count
    intermediate_size: Count
    num_attention_heads: Count | None = None
    kv_lora_rank: Count | None = None
    qk_nope_head_dim: Count | None = None
    qk_rope_head_dim: Index | None = None
    v_head_dim: Count | None = None
    q_lora_rank: Count | None = None
    mla_use_output_gate: bool = True
    linear_attn_config: LinearAttnConfig
    hidden_act: Literal["situ", "silu"] = "situ"
    activation_situ_beta: Positive | None = 4.0
    activation_situ_linear_beta: Positive | None = 25.0
    attn_res_block_size: Count | None = 12
    num_experts: Count | None = None
    num_experts_per_token: Count | None = None
    moe_intermediate_size: Count | None = None
    num_shared_experts: Index = 0
    first_k_dense_replace: Index = 0
    moe_layer_freq: Count = 1
    moe_router_activation_func: Literal["sigmoid", "softmax"] = "sigmoid"
    moe_renormalize: bool = True
    routed_scaling_factor: Number = 1.0
    num_expert_group: Count = 1
    topk_group: Count = 1
    routed_expert_hidden_size: Count | None = None
    latent_moe_use_norm: bool = True
    rms_norm_eps: Positive = 1e-5
    tie_word_embeddings: bool = True
    pad_token_id: Index = 0
    eos_token_id: Index | list[Index] | None = None
    max_seq_len: Count
    kda_chunk_size: Annotated[Literal[16, 32, 64, 128, 256], BeforeValidator(_integer)] = 64
    kda_backend: Literal["chunkwise", "fused"] = "chunkwise"

    @classmethod
    def from_dict(cls, raw: object) -> Self:
        """Read a checkpoint's `model_config`.

        Raises:
            ConfigError: with every unknown key and impossible value, each named.
        """
        if not isinstance(raw, dict):
            raise ConfigError(f"model_config is a {type(raw).__name__}; it must be a dictionary of architecture keys")
        strange = [key for key in raw if not isinstance(key, str)]
        if strange:
            raise ConfigError(f"model_config has the key {strange[0]!r}; keys are strings")
        problems = _fixed_value_problems(raw)
        known = {key: value for key, value in raw.items() if key not in IGNORED_KEYS and key not in FIXED_VALUES}
        known.pop("num_key_value_heads", None)
        try:
            config = cls(**known)
        except ValidationError as error:
            problems += [_sentence(each) for each in error.errors()]
            raise ConfigError("model_config: " + "; ".join(problems)) from None
        problems += config._inconsistencies()
        if problems:
            raise ConfigError("model_config: " + "; ".join(problems))
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers that `from_dict` reads back as an equal configuration."""
        return self.model_dump()

    def with_backend(self, backend: Literal["chunkwise", "fused"]) -> Self:
        """Return the same architecture with another KDA backend."""
        return self.model_copy(update={"kda_backend": backend})

    def is_kda(self, layer: int) -> bool:
        """Say whether the 0-based layer is a KDA layer (else it is full attention)."""
        return layer + 1 in self.linear_attn_config.kda_layers

    def is_moe(self, layer: int) -> bool:
        """Say whether the 0-based layer has experts (else a dense feed-forward)."""
        return self.num_experts is not None and layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The configured end-of-sequence ids, none to several."""
        if self.eos_token_id is None:
            return ()
        return (self.eos_token_id,) if isinstance(self.eos_token_id, int) else tuple(self.eos_token_id)

    def cache_bytes_fixed(self) -> int:
        """Bytes of the recurrent states [H,K,K] and the three convolution tails of one sequence, float32."""
        linear = self.linear_attn_config
        state = linear.num_heads * linear.head_dim**2
        tails = 3 * (linear.short_conv_kernel_size - 1) * linear.num_heads * linear.head_dim
        return len(linear.kda_layers) * (state + tails) * FLOAT32_BYTES

    def cache_bytes_per_token(self) -> int:
        """Bytes of the compressed latents and shared keys of one token, all full-attention layers, float32."""
        per_layer = (self.kv_lora_rank or 0) + (self.qk_rope_head_dim or 0)
        return len(self.linear_attn_config.full_attn_layers) * per_layer * FLOAT32_BYTES

    def _inconsistencies(self) -> list[str]:
        return [
            *self._layer_list_problems(),
            *self._attention_problems(),
            *self._expert_problems(),
            *self._id_problems(),
        ]

    def _layer_list_problems(self) -> list[str]:
        linear, layers = self.linear_attn_config, self.num_hidden_layers
        listed = Counter(linear.kda_layers + linear.full_attn_layers)
        twice = sorted(layer for layer, count in listed.items() if count > 1)
        missing = list(islice((layer for layer in range(1, layers + 1) if layer not in listed), SHOWN_LAYERS))
        beyond = sorted(layer for layer in listed if layer > layers)
        name = "linear_attn_config.kda_layers and .full_attn_layers"
        problems = []
        if twice:
            problems.append(f"{name} list layers {twice[:SHOWN_LAYERS]} more than once; list each layer once")
        if missing:
            problems.append(f"{name} leave out layers {missing}; together they must list 1 to {layers}")
        if beyond:
            problems.append(f"{name} list layers {beyond[:SHOWN_LAYERS]}, but num_hidden_layers is {layers}")
        return problems

    def _attention_problems(self) -> list[str]:
        if not self.linear_attn_config.full_attn_layers:
            return []
        return [f"{key} is missing; full-attention layers need it" for key in MLA_KEYS if getattr(self, key) is None]

    def _expert_problems(self) -> list[str]:
        experts, chosen = self.num_experts, self.num_experts_per_token
        if experts is None:
            return []
        problems = [f"{key} is missing; num_experts is {experts}" for key in MOE_KEYS if getattr(self, key) is None]
        if chosen is not None and chosen > experts:
            problems.append(f"num_experts_per_token is {chosen}, more than num_experts {experts}")
        groups = self.num_expert_group
        if self.topk_group > groups:
            problems.append(f"topk_group is {self.topk_group}, more than num_expert_group {groups}")
        if experts % groups:
            problems.append(f"num_experts {experts} is not divisible by num_expert_group {groups}")
        elif groups > 1 and experts // groups < 2:
            problems.append(f"num_expert_group {groups} gives groups of one expert; a group needs at least 2")
        elif chosen is not None and self.topk_group * (experts // groups) < chosen <= experts:
            held = self.topk_group * (experts // groups)
            problems.append(
                f"topk_group {self.topk_group} holds {held} experts, fewer than num_experts_per_token {chosen}"
            )
        return problems

    def _id_problems(self) -> list[str]:
        ids = [("pad_token_id", self.pad_token_id), *(("eos_token_id", each) for each in self.eos_token_ids)]
        return [f"{key} is {value}; vocab_size is {self.vocab_size}" for key, value in ids if value >= self.vocab_size]


def _fixed_value_problems(raw: dict[Any, Any]) -> list[str]:
    allowed_values: dict[str, Sequence[object]] = {
        **FIXED_VALUES,
        "num_key_value_heads": (raw.get("num_attention_heads"), None),
    }
    problems = []
    for key, allowed in allowed_values.items():
        if key in raw and not any(raw[key] == value and type(raw[key]) is type(value) for value in allowed):
            choices = " or ".join(repr(value) for value in allowed)
            problems.append(f"{key} is {raw[key]!r}; this architecture has only {choices}")
    return problems


def _sentence(error: Any) -> str:
    first, *rest = (str(part) for part in error["loc"])
    # after the keys, pydantic names the branch of a union that it tried
    key = ".".join([first, *(part for part in rest if part.isidentifier() and part not in ("int", "float"))])
    if error["type"] == "missing":
        return f"{key} is missing; it has no default"
    if error["type"] == "extra_forbidden":
        return f"{key} is not a key of this architecture; remove it or correct its spelling"
    return f"{key} is {error['input']!r}; {error['msg']}"
