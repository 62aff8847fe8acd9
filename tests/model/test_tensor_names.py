"""Names and shapes of every tensor, against the list written by hand."""

from typing import Any

import pytest
import torch
from checkpoints import mini_config
from hypothesis import given
from strategies import REPEATABLE, model_configs
from tensor_list import tensor_shapes

from kimik3_cli.engine.checkpoint.tensors import tensor_specs
from kimik3_cli.engine.config import KimiK3Config
from kimik3_cli.engine.model.decoder import KimiK3

PARTS = {
    "embed_tokens.weight": "embedding",
    "lm_head.weight": "head",
    "norm.weight": "norms",
    "output_attn_res_norm.weight": "norms",
    "output_attn_res_proj.weight": "norms",
    "layers.0.input_layernorm.weight": "norms",
    "layers.0.post_attention_layernorm.weight": "norms",
    "layers.0.self_attention_res_norm.weight": "norms",
    "layers.0.self_attention_res_proj.weight": "norms",
    "layers.0.mlp_res_norm.weight": "norms",
    "layers.0.mlp_res_proj.weight": "norms",
    "layers.0.self_attn.q_conv1d.weight": "kda",
    "layers.0.self_attn.A_log": "kda",
    "layers.0.self_attn.dt_bias": "kda",
    "layers.0.self_attn.o_norm.weight": "kda",
    "layers.3.self_attn.q_a_layernorm.weight": "mla",
    "layers.3.self_attn.kv_a_layernorm.weight": "mla",
    "layers.3.self_attn.g_proj.weight": "mla",
    "layers.0.mlp.down_proj.weight": "dense_ffn",
    "layers.1.block_sparse_moe.gate.weight": "routing",
    "layers.1.block_sparse_moe.gate.e_score_correction_bias": "routing",
    "layers.1.block_sparse_moe.routed_expert_down_proj.weight": "routing",
    "layers.1.block_sparse_moe.routed_expert_up_proj.weight": "routing",
    "layers.1.block_sparse_moe.routed_expert_norm.weight": "routing",
    "layers.1.block_sparse_moe.experts.5.w2.weight": "routed_experts",
    "layers.1.block_sparse_moe.shared_experts.gate_proj.weight": "shared_experts",
}


@REPEATABLE
@given(raw=model_configs())
def test_names_and_shapes(raw: dict[str, Any]) -> None:
    config, listed = KimiK3Config.from_dict(raw), tensor_shapes(raw)
    assert {name: tuple(spec.shape) for name, spec in tensor_specs(config).items()} == listed
    with torch.device("meta"):
        built = {name: tuple(tensor.shape) for name, tensor in KimiK3(config).state_dict().items()}
    if config.tie_word_embeddings:
        assert built.pop("lm_head.weight") == listed["embed_tokens.weight"]
    assert built == listed


@pytest.mark.parametrize(("name", "part"), PARTS.items())
def test_parts(name: str, part: str) -> None:
    assert tensor_specs(KimiK3Config.from_dict(mini_config()))[name].part == part


@REPEATABLE
@given(raw=model_configs())
def test_every_tensor_is_a_parameter(raw: dict[str, Any]) -> None:
    """A buffer would be skipped by optimisers and by `load_state_dict(assign=True)` dtype rules."""
    with torch.device("meta"):
        model = KimiK3(KimiK3Config.from_dict(raw))
    assert not list(model.buffers())
