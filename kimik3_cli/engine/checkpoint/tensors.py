"""Name, shape and part of every tensor that a configuration asks for.

The one list that the loader and the inspector share. It knows no file format.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

from kimik3_cli.engine.config import KimiK3Config
from kimik3_cli.errors import ConfigError
from kimik3_cli.results import ParameterCounts, PartCounts

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
# The released K3 has 250,000 tensors; far beyond that a configuration is damaged, and listing it would fill memory.
MAX_TENSORS = 5_000_000


class TensorSpec(NamedTuple):
    """What the configuration asks of one tensor."""

    shape: tuple[int, ...]
    part: str


Specs = Iterator[tuple[str, TensorSpec]]


def tensor_specs(config: KimiK3Config) -> dict[str, TensorSpec]:
    """Return every tensor of the model: embedding, head, final norm and mixing, then layer by layer.

    `lm_head.weight` is absent when the head is tied. Parts are the fields of `results.PartCounts`.

    Raises:
        ConfigError: the configuration asks for more than `MAX_TENSORS` tensors.
    """
    moe_layers = sum(config.is_moe(layer) for layer in range(config.num_hidden_layers))
    count = 25 * config.num_hidden_layers + 3 * moe_layers * (config.num_experts or 0)
    if count > MAX_TENSORS:
        raise ConfigError(
            f"model_config: num_hidden_layers {config.num_hidden_layers} and num_experts {config.num_experts} ask for "
            f"about {count} tensors; more than {MAX_TENSORS} are not supported"
        )
    return dict(_model_specs(config))


def _model_specs(config: KimiK3Config) -> Specs:
    V, D = config.vocab_size, config.hidden_size
    yield EMBEDDING, TensorSpec((V, D), "embedding")
    if not config.tie_word_embeddings:
        yield HEAD, TensorSpec((V, D), "head")
    yield "norm.weight", TensorSpec((D,), "norms")
    if config.attn_res_block_size is not None:
        yield from _mixing_specs("output_attn_res", D)
    for layer in range(config.num_hidden_layers):
        for name, spec in _layer_specs(config, layer):
            yield f"layers.{layer}.{name}", spec


def _layer_specs(config: KimiK3Config, layer: int) -> Specs:
    D = config.hidden_size
    yield "input_layernorm.weight", TensorSpec((D,), "norms")
    yield "post_attention_layernorm.weight", TensorSpec((D,), "norms")
    if config.attn_res_block_size is not None:
        yield from _mixing_specs("self_attention_res", D)
        yield from _mixing_specs("mlp_res", D)
    part, shapes = ("kda", _kda_shapes(config)) if config.is_kda(layer) else ("mla", _mla_shapes(config))
    for name, shape in shapes.items():
        yield f"self_attn.{name}", TensorSpec(shape, part)
    if config.is_moe(layer):
        yield from _moe_specs(config)
    else:
        yield from _ffn_specs("mlp", D, config.intermediate_size, "dense_ffn")


def _mixing_specs(name: str, D: int) -> Specs:
    yield f"{name}_norm.weight", TensorSpec((D,), "norms")
    yield f"{name}_proj.weight", TensorSpec((1, D), "norms")


def _kda_shapes(config: KimiK3Config) -> dict[str, tuple[int, ...]]:
    linear, D = config.linear_attn_config, config.hidden_size
    H, K = linear.num_heads, linear.head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    for letter in "qkv":
        shapes[f"{letter}_proj.weight"] = (H * K, D)
    for letter in "qkv":
        shapes[f"{letter}_conv1d.weight"] = (H * K, 1, linear.short_conv_kernel_size)
    shapes |= {"f_a_proj.weight": (K, D), "f_b_proj.weight": (H * K, K), "b_proj.weight": (H, D)}
    if linear.use_full_rank_gate:
        shapes["g_proj.weight"] = (H * K, D)
    else:
        shapes |= {"g_a_proj.weight": (K, D), "g_b_proj.weight": (H * K, K)}
    return shapes | {"o_norm.weight": (K,), "o_proj.weight": (D, H * K), "A_log": (H,), "dt_bias": (H * K,)}


def _mla_shapes(config: KimiK3Config) -> dict[str, tuple[int, ...]]:
    D, H, latent = config.hidden_size, config.num_attention_heads or 0, config.kv_lora_rank or 0
    nope, rope, value = config.qk_nope_head_dim or 0, config.qk_rope_head_dim or 0, config.v_head_dim or 0
    query, rank = H * (nope + rope), config.q_lora_rank
    shapes: dict[str, tuple[int, ...]] = {}
    if rank is None:
        shapes["q_proj.weight"] = (query, D)
    else:
        shapes |= {"q_a_proj.weight": (rank, D), "q_a_layernorm.weight": (rank,), "q_b_proj.weight": (query, rank)}
    shapes |= {
        "kv_a_proj_with_mqa.weight": (latent + rope, D),
        "kv_a_layernorm.weight": (latent,),
        "kv_b_proj.weight": (H * (nope + value), latent),
        "o_proj.weight": (D, H * value),
    }
    if config.mla_use_output_gate:
        shapes["g_proj.weight"] = (H * value, D)
    return shapes


def _moe_specs(config: KimiK3Config) -> Specs:
    D, E, width = config.hidden_size, config.num_experts or 0, config.moe_intermediate_size or 0
    latent = config.routed_expert_hidden_size
    prefix = "block_sparse_moe"
    yield f"{prefix}.gate.weight", TensorSpec((E, D), "routing")
    yield f"{prefix}.gate.e_score_correction_bias", TensorSpec((E,), "routing")
    inward = TensorSpec((width, latent or D), "routed_experts")
    outward = TensorSpec((latent or D, width), "routed_experts")
    for e in range(E):
        yield f"{prefix}.experts.{e}.w1.weight", inward
        yield f"{prefix}.experts.{e}.w3.weight", inward
        yield f"{prefix}.experts.{e}.w2.weight", outward
    if config.num_shared_experts:
        yield from _ffn_specs(f"{prefix}.shared_experts", D, config.num_shared_experts * width, "shared_experts")
    if latent is not None:
        yield f"{prefix}.routed_expert_down_proj.weight", TensorSpec((latent, D), "routing")
        yield f"{prefix}.routed_expert_up_proj.weight", TensorSpec((D, latent), "routing")
        if config.latent_moe_use_norm:
            yield f"{prefix}.routed_expert_norm.weight", TensorSpec((latent,), "routing")


def _ffn_specs(prefix: str, D: int, width: int, part: str) -> Specs:
    yield f"{prefix}.gate_proj.weight", TensorSpec((width, D), part)
    yield f"{prefix}.up_proj.weight", TensorSpec((width, D), part)
    yield f"{prefix}.down_proj.weight", TensorSpec((D, width), part)


def count_parameters(config: KimiK3Config, specs: Mapping[str, TensorSpec]) -> ParameterCounts:
    """Count the parameters that the configuration asks for, whatever a file holds; a tied head counts once.

    Active per token = total less the input embedding less the routed experts that are not chosen.
    """
    parts: Counter[str] = Counter()
    for spec in specs.values():
        parts[spec.part] += prod(spec.shape)
    experts, chosen = config.num_experts or 1, config.num_experts_per_token or 1
    idle = parts["routed_experts"] // experts * (experts - chosen)
    total = parts.total()
    return ParameterCounts(
        total=total,
        active=total - parts["embedding"] - idle,
        parts=PartCounts(**{name: parts[name] for name in PartCounts.model_fields}),
    )


def shape_fits(name: str, wanted: tuple[int, ...], found: tuple[int, ...]) -> bool:
    """Say whether a stored shape is the wanted one; `A_log` [H] may also be padded [n >= H] or [1,1,H,1]."""
    if found == wanted:
        return True
    if not name.endswith(".A_log"):
        return False
    (H,) = wanted
    return found == (1, 1, H, 1) or (len(found) == 1 and found[0] >= H)
