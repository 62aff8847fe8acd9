"""The name and shape of every tensor of a model, written by hand from docs/architecture.md.

The package has its own list, which is tested against this one.
"""

from collections.abc import Iterator
from typing import Any

from oracle import with_defaults

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def tensor_shapes(model_config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a model; a tied head is absent."""
    c = with_defaults(model_config)
    return dict(_model_shapes(c))


def _model_shapes(c: dict[str, Any]) -> Shapes:
    hidden, vocab = c["hidden_size"], c["vocab_size"]
    yield "embed_tokens.weight", (vocab, hidden)
    for i in range(c["num_hidden_layers"]):
        yield from ((f"layers.{i}.{name}", shape) for name, shape in _layer_shapes(c, i))
    if c["attn_res_block_size"] is not None:
        yield "output_attn_res_norm.weight", (hidden,)
        yield "output_attn_res_proj.weight", (1, hidden)
    yield "norm.weight", (hidden,)
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def _layer_shapes(c: dict[str, Any], i: int) -> Shapes:
    hidden = c["hidden_size"]
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    if c["attn_res_block_size"] is not None:
        yield "self_attention_res_norm.weight", (hidden,)
        yield "self_attention_res_proj.weight", (1, hidden)
        yield "mlp_res_norm.weight", (hidden,)
        yield "mlp_res_proj.weight", (1, hidden)
    attention = _kda_shapes if i + 1 in c["linear_attn_config"]["kda_layers"] else _mla_shapes
    yield from (("self_attn." + name, shape) for name, shape in attention(c))
    if c["num_experts"] is not None and i >= c["first_k_dense_replace"] and i % c["moe_layer_freq"] == 0:
        yield from (("block_sparse_moe." + name, shape) for name, shape in _moe_shapes(c))
    else:
        yield from (("mlp." + name, shape) for name, shape in _ffn_shapes(hidden, c["intermediate_size"]))


def _kda_shapes(c: dict[str, Any]) -> Shapes:
    linear = c["linear_attn_config"]
    hidden, heads, size = c["hidden_size"], linear["num_heads"], linear["head_dim"]
    width = heads * size
    for letter in "qkv":
        yield f"{letter}_proj.weight", (width, hidden)
        yield f"{letter}_conv1d.weight", (width, 1, linear["short_conv_kernel_size"])
    yield "f_a_proj.weight", (size, hidden)
    yield "f_b_proj.weight", (width, size)
    yield "b_proj.weight", (heads, hidden)
    if linear["use_full_rank_gate"]:
        yield "g_proj.weight", (width, hidden)
    else:
        yield "g_a_proj.weight", (size, hidden)
        yield "g_b_proj.weight", (width, size)
    yield "o_norm.weight", (size,)
    yield "o_proj.weight", (hidden, width)
    yield "A_log", (heads,)
    yield "dt_bias", (width,)


def _mla_shapes(c: dict[str, Any]) -> Shapes:
    hidden, heads, query, latent = c["hidden_size"], c["num_attention_heads"], c["q_lora_rank"], c["kv_lora_rank"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    if query is None:
        yield "q_proj.weight", (heads * (nope + rope), hidden)
    else:
        yield "q_a_proj.weight", (query, hidden)
        yield "q_a_layernorm.weight", (query,)
        yield "q_b_proj.weight", (heads * (nope + rope), query)
    yield "kv_a_proj_with_mqa.weight", (latent + rope, hidden)
    yield "kv_a_layernorm.weight", (latent,)
    yield "kv_b_proj.weight", (heads * (nope + value), latent)
    yield "o_proj.weight", (hidden, heads * value)
    if c["mla_use_output_gate"]:
        yield "g_proj.weight", (heads * value, hidden)


def _ffn_shapes(hidden: int, width: int) -> Shapes:
    yield "gate_proj.weight", (width, hidden)
    yield "up_proj.weight", (width, hidden)
    yield "down_proj.weight", (hidden, width)


def _moe_shapes(c: dict[str, Any]) -> Shapes:
    hidden, width, experts = c["hidden_size"], c["moe_intermediate_size"], c["num_experts"]
    latent = hidden if c["routed_expert_hidden_size"] is None else c["routed_expert_hidden_size"]
    yield "gate.weight", (experts, hidden)
    yield "gate.e_score_correction_bias", (experts,)
    for e in range(experts):
        yield f"experts.{e}.w1.weight", (width, latent)
        yield f"experts.{e}.w3.weight", (width, latent)
        yield f"experts.{e}.w2.weight", (latent, width)
    if c["num_shared_experts"] > 0:
        for name, shape in _ffn_shapes(hidden, c["num_shared_experts"] * width):
            yield "shared_experts." + name, shape
    if c["routed_expert_hidden_size"] is not None:
        yield "routed_expert_down_proj.weight", (latent, hidden)
        yield "routed_expert_up_proj.weight", (hidden, latent)
        if c["latent_moe_use_norm"]:
            yield "routed_expert_norm.weight", (latent,)
