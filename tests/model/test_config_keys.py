"""Every key of a checkpoint's configuration is honoured: architecture keys move the logits, the others do not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ids, mk
from comparison import assert_close, assert_matches_oracle, load, relative_difference
from oracle import DEFAULTS, LINEAR_DEFAULTS, oracle_logits

from kimik3_cli.engine.generation import next_token_logits

PROMPT = ids(80)
VISIBLE = 1e-3
# (key, value, other keys that both the changed and the compared model have)
GRAPH: list[tuple[str, Any, dict[str, Any]]] = [
    ("q_lora_rank", None, {}),
    ("mla_use_output_gate", False, {}),
    ("hidden_act", "silu", {}),
    ("activation_situ_beta", 1.0, {}),
    ("activation_situ_beta", None, {}),
    ("activation_situ_linear_beta", 1.0, {}),
    ("activation_situ_linear_beta", None, {}),
    ("attn_res_block_size", 1, {}),
    ("attn_res_block_size", 3, {}),
    ("attn_res_block_size", None, {}),
    ("num_experts", None, {}),
    ("num_experts_per_token", 3, {}),
    ("num_shared_experts", 0, {}),
    ("num_shared_experts", 2, {}),
    ("first_k_dense_replace", 0, {}),
    ("first_k_dense_replace", 3, {}),
    ("moe_layer_freq", 2, {}),
    ("moe_router_activation_func", "softmax", {"latent_moe_use_norm": False}),
    ("moe_renormalize", False, {"latent_moe_use_norm": False}),
    ("routed_scaling_factor", 2.446, {"latent_moe_use_norm": False}),
    ("topk_group", 2, {"num_expert_group": 3}),
    ("num_expert_group", 2, {}),
    ("routed_expert_hidden_size", None, {}),
    ("latent_moe_use_norm", False, {}),
    ("rms_norm_eps", 1e-6, {}),
    ("rms_norm_eps", 1e-2, {}),
    ("tie_word_embeddings", True, {}),
]
# Keys whose every value makes other tensors; the seed's weights differ too, so only the oracle can judge.
SIZES: list[tuple[str, Any]] = [
    ("vocab_size", 100),
    ("hidden_size", 24),
    ("intermediate_size", 20),
    ("num_attention_heads", 3),
    ("q_lora_rank", 10),
    ("kv_lora_rank", 7),
    ("qk_nope_head_dim", 6),
    ("qk_rope_head_dim", 2),
    ("v_head_dim", 10),
    ("num_experts", 8),
    ("moe_intermediate_size", 12),
    ("routed_expert_hidden_size", 20),
]
LINEAR: list[dict[str, Any]] = [
    {"kda_layers": [1, 3, 5], "full_attn_layers": [2, 4]},
    {"kda_layers": [4], "full_attn_layers": [1, 2, 3, 5]},
    {"num_heads": 3},
    {"head_dim": 8},
    {"head_dim": 12},
    {"short_conv_kernel_size": 2},
    {"use_full_rank_gate": False},
    {"gate_lower_bound": -4.0},
    {"gate_lower_bound": None},
]
NOT_ARCHITECTURE: list[dict[str, Any]] = [
    {"max_seq_len": 128},
    {"kda_chunk_size": 16},
    {"kda_chunk_size": 32},
    {"kda_chunk_size": 128},
    {"kda_chunk_size": 256},
    {"kda_backend": "fused"},
    {"pad_token_id": 17},
    {"eos_token_id": 5},
    {"eos_token_id": [5, 6]},
    {"rope_theta": 10000.0},
    {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    {"max_position_embeddings": 16},
    {"num_key_value_heads": 2},
    {"mla_use_nope": True},
    {"head_dim": 7},
    {"dtype": "bfloat16", "model_type": "kimi_linear", "use_cache": False},
]


@pytest.mark.parametrize(("key", "value", "base"), GRAPH)
def test_graph_keys(key: str, value: Any, base: dict[str, Any], tmp_path: Path) -> None:
    changed = mk(tmp_path / "changed.pt", {**base, key: value})
    logits = assert_matches_oracle(tmp_path / "changed.pt", changed, PROMPT)
    unchanged = oracle_logits(mk(tmp_path / "base.pt", base), PROMPT)[-1]
    assert relative_difference(logits, unchanged) > VISIBLE


@pytest.mark.parametrize(("key", "value"), SIZES)
def test_sizes(key: str, value: int, tmp_path: Path) -> None:
    changed = mk(tmp_path / "changed.pt", {key: value})
    assert_matches_oracle(tmp_path / "changed.pt", changed, PROMPT)


def test_num_hidden_layers(tmp_path: Path) -> None:
    changed = mk(tmp_path / "changed.pt", {"num_hidden_layers": 4}, lin={"kda_layers": [1, 2, 3]})
    logits = assert_matches_oracle(tmp_path / "changed.pt", changed, PROMPT)
    assert relative_difference(logits, oracle_logits(mk(tmp_path / "base.pt"), PROMPT)[-1]) > VISIBLE


@pytest.mark.parametrize("changes", LINEAR, ids=str)
def test_linear_attention_keys(changes: dict[str, Any], tmp_path: Path) -> None:
    changed = mk(tmp_path / "changed.pt", lin=changes)
    logits = assert_matches_oracle(tmp_path / "changed.pt", changed, PROMPT)
    assert relative_difference(logits, oracle_logits(mk(tmp_path / "base.pt"), PROMPT)[-1]) > VISIBLE


@pytest.mark.parametrize("changes", NOT_ARCHITECTURE, ids=str)
def test_keys_outside_the_graph(changes: dict[str, Any], tmp_path: Path) -> None:
    mk(tmp_path / "base.pt")
    mk(tmp_path / "changed.pt", changes)
    expected = next_token_logits(load(tmp_path / "base.pt"), PROMPT)
    assert_close(next_token_logits(load(tmp_path / "changed.pt"), PROMPT), expected)


# Without experts the router would have nothing to default.
OPTIONAL = {
    key: value
    for key, value in DEFAULTS.items()
    if key not in ("num_experts", "num_experts_per_token", "moe_intermediate_size")
}


@pytest.mark.parametrize("key", [*OPTIONAL, *LINEAR_DEFAULTS])
def test_a_key_left_out_has_its_default(key: str, tmp_path: Path) -> None:
    """Leaving a key out gives, bit for bit, the model that has the default written out."""
    written = mk(tmp_path / "written.pt", OPTIONAL, lin=LINEAR_DEFAULTS)
    expected = next_token_logits(load(tmp_path / "written.pt"), PROMPT)
    config = written["model_config"]
    (config if key in OPTIONAL else config["linear_attn_config"]).pop(key)
    torch.save(written, tmp_path / "left_out.pt")
    assert torch.equal(next_token_logits(load(tmp_path / "left_out.pt"), PROMPT), expected)
