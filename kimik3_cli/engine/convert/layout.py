"""Hugging Face directories as the released models have them: config.json, and names and shapes of the tensors.

There are two forms. `kimi_linear` is flat, like the released Kimi Linear, and transformers runs it without further
code. `kimi_k3` is nested, like the released K3, for everything that Kimi Linear does not have.
"""

from typing import Any, Literal

from kimik3_cli.engine.checkpoint.huggingface.config import OWN_KEY
from kimik3_cli.engine.checkpoint.tensors import HEAD
from kimik3_cli.engine.config import KimiK3Config

Form = Literal["kimi_linear", "kimi_k3"]
# Keys that no released field can carry.
TRAINER_KEYS = ("kda_chunk_size", "kda_backend")
# Left out when null, because transformers refuses null for them.
ABSENT_WHEN_NULL = (
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "num_experts",
    "num_experts_per_token",
    "moe_intermediate_size",
)
# What the released files say of every such model.
CONSTANTS: dict[str, Any] = {
    "bos_token_id": None,
    "mla_use_nope": True,
    "num_nextn_predict_layers": 0,
    "topk_method": "noaux_tc",
    "use_cache": True,
    "use_grouped_topk": True,
}


def form_of(config: KimiK3Config) -> Form:
    """Return `kimi_linear` when transformers' implementation of it computes the same model, else `kimi_k3`."""
    is_plain = config.hidden_act == "silu" and config.attn_res_block_size is None
    return "kimi_linear" if is_plain and _plain_attention(config) and _plain_experts(config) else "kimi_k3"


def _plain_attention(config: KimiK3Config) -> bool:
    linear = config.linear_attn_config
    plain_kda = linear.gate_lower_bound is None and not linear.use_full_rank_gate
    return (plain_kda or not linear.kda_layers) and not (config.mla_use_output_gate and linear.full_attn_layers)


def _plain_experts(config: KimiK3Config) -> bool:
    if config.num_experts is None:
        return True
    is_plain = config.moe_router_activation_func == "sigmoid" and config.routed_expert_hidden_size is None
    # transformers takes the two best of every group, even when there is one group
    return is_plain and config.num_experts // config.num_expert_group >= 2


def stored_name(form: Form, name: str) -> str:
    """Return the name in the directory of a tensor of the model."""
    prefix = "language_model." if form == "kimi_k3" else ""
    return prefix + (name if name == HEAD else f"model.{name}")


def stored_shape(config: KimiK3Config, form: Form, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in the directory: the model's, but `A_log` [H] is [1,1,H,1] or, in K3, filled up to head_dim."""
    if not name.endswith(".A_log"):
        return shape
    (H,) = shape
    return (1, 1, H, 1) if form == "kimi_linear" else (max(H, config.linear_attn_config.head_dim),)


def config_json(config: KimiK3Config, form: Form, dtype: str) -> dict[str, Any]:
    """Return the content of config.json.

    A tied head is stored as a tensor and `tie_word_embeddings` is false: transformers does not tie these models, and
    vLLM leaves the head unset when told that it is tied. The object of our own says what is true.

    Args:
        config: the architecture.
        form: see `form_of`.
        dtype: of most of the weights.
    """
    fields = config.to_dict()
    own = {key: fields.pop(key) for key in TRAINER_KEYS}
    if fields["tie_word_embeddings"]:
        own["tie_word_embeddings"] = True
    text = {key: value for key, value in fields.items() if value is not None or key not in ABSENT_WHEN_NULL}
    text |= CONSTANTS
    text |= {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": dtype,
        "max_position_embeddings": text.pop("max_seq_len"),
        "tie_word_embeddings": False,
    }
    if config.num_attention_heads is not None:
        text["num_key_value_heads"] = config.num_attention_heads
    return _flat(config, text, own) if form == "kimi_linear" else _nested(text, own)


def _flat(config: KimiK3Config, text: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    if config.num_experts_per_token == 1 and config.moe_renormalize:
        # this architecture renormalizes the weights of several experts only, transformers that of one too
        own, text = {**own, "moe_renormalize": True}, {**text, "moe_renormalize": False}
    layers = range(config.num_hidden_layers)
    # transformers knows neither moe_layer_freq nor models without experts, and reads this list instead
    kinds = ["sparse" if config.is_moe(layer) else "dense" for layer in layers]
    return {**text, "mlp_layer_types": kinds, OWN_KEY: own}


def _nested(text: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    shared = ("bos_token_id", "dtype", "eos_token_id", "pad_token_id", "tie_word_embeddings")
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        **{key: text[key] for key in shared},
        "text_config": text,
        OWN_KEY: own,
    }


def generation_json(config: KimiK3Config) -> dict[str, Any]:
    """Return the content of generation_config.json: the ids that end and fill up a text."""
    ids = {"eos_token_id": config.eos_token_id, "pad_token_id": config.pad_token_id}
    return {key: value for key, value in ids.items() if value is not None}
