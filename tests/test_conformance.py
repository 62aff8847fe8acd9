"""The package against reference data of independent implementations: whole models, and every single operator."""

from typing import Any, TypeVar

import pytest
import reference_data
import torch
from reference_data import assert_within, operator
from torch import Tensor, nn

from kimik3_cli.engine.cache import KdaState, MlaState
from kimik3_cli.engine.checkpoint.load import load_checkpoint_model
from kimik3_cli.engine.config import KimiK3Config
from kimik3_cli.engine.generation import generate_tokens, next_token_logits
from kimik3_cli.engine.kda.chunkwise import kda_chunkwise
from kimik3_cli.engine.kda.gates import decay_rate, log_decay
from kimik3_cli.engine.kda.recurrent import kda_recurrent
from kimik3_cli.engine.model.decoder import DecoderLayer, KimiK3
from kimik3_cli.engine.model.ffn import LatentMoe, Router
from kimik3_cli.engine.model.kda import KdaAttention, short_conv
from kimik3_cli.engine.model.mla import MlaAttention
from kimik3_cli.engine.model.parts import RMSNorm, SituGlu, linear, mix_residuals

LOGITS, OPERATOR = 2e-4, 2e-5
Module = TypeVar("Module", bound=nn.Module)


@pytest.fixture(scope="module", params=reference_data.CASES)
def case(request: pytest.FixtureRequest) -> tuple[KimiK3, dict[str, Any]]:
    return load_checkpoint_model(reference_data.case_path(request.param))[0], reference_data.case(request.param)


def test_next_token_logits(case: tuple[KimiK3, dict[str, Any]]) -> None:
    model, expected = case
    for prompt in expected["prompts"]:
        logits = next_token_logits(model, prompt["token_ids"])
        assert_within(logits, torch.tensor(prompt["next_token_logits"]), LOGITS)


def test_greedy_tokens(case: tuple[KimiK3, dict[str, Any]]) -> None:
    model, expected = case
    for prompt in expected["prompts"]:
        new = generate_tokens(
            model,
            prompt["token_ids"],
            max_new_tokens=expected["max_new_tokens"],
            eos_id=expected["eos_id_never_produced"],
        )
        assert min(prompt["greedy_top2_gap"]) > 1e-3
        assert new == prompt["greedy_token_ids"]


def test_best_token_at_every_position(case: tuple[KimiK3, dict[str, Any]]) -> None:
    model, expected = case
    prompt = expected["prompts"][1]
    with torch.no_grad():
        at_once = model(torch.tensor([prompt["token_ids"]]))[0].argmax(-1).tolist()
    ids = prompt["token_ids"]
    one_by_one = [int(next_token_logits(model, ids[: n + 1]).argmax()) for n in range(0, len(ids), 7)]
    assert at_once == prompt["argmax_per_position"]
    assert one_by_one == prompt["argmax_per_position"][::7]


# The sizes that the layer operators share.
CONFIG = KimiK3Config.from_dict(
    {
        "vocab_size": 8,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "intermediate_size": 8,
        "num_attention_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 4, "head_dim": 16},
        "attn_res_block_size": 3,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 2,
        "routed_expert_hidden_size": 64,
        "moe_intermediate_size": 48,
        "max_seq_len": 64,
    }
)


def with_weights(module: Module, data: dict[str, Tensor], prefix: str = "") -> Module:
    """`module` with the operator's weights, every one of them and no other."""
    names = module.state_dict().keys()
    module.load_state_dict({name: data[prefix + name] for name in names})
    return module.requires_grad_(False)


def test_rmsnorm() -> None:
    data = operator("rmsnorm")
    assert_within(with_weights(RMSNorm(128, 1e-5), data)(data["in"]), data["out"], OPERATOR)


def test_situ_glu() -> None:
    data = operator("situ_glu")
    assert_within(SituGlu(4.0, 25.0)(*data["in"].chunk(2, dim=-1)), data["out"], OPERATOR)


def test_shortconv() -> None:
    data = operator("shortconv")
    taps = data["weight"].squeeze(1).T
    out, tail = short_conv(data["in"], taps)
    assert_within(out, data["out"], OPERATOR)
    assert_within(tail.transpose(1, 2), data["state_after"], OPERATOR)
    assert_within(short_conv(data["in_next"], taps, tail)[0], data["out_next"], OPERATOR)


def test_kda_decay() -> None:
    data = operator("kda_decay")
    z = (data["z"] + data["dt_bias"]).unflatten(-1, (4, 16))
    g = log_decay(z, decay_rate(data["A_log"], -5.0), -5.0)
    assert_within(g, data["g"], OPERATOR)
    assert_within(g.exp(), data["alpha"], OPERATOR)


@pytest.mark.parametrize("kernel", [kda_recurrent, kda_chunkwise])
def test_kda_recur8(kernel: Any) -> None:
    data = operator("kda_recur8")
    scale = reference_data.operators()["kda_recur8"]["q_scale"]
    q, k, v, alpha, beta = (data[name][None] for name in ("q", "k", "v", "alpha", "beta"))
    out, state = kernel(q * scale, k, v, alpha.log(), beta)
    assert_within(out[0], data["out"], OPERATOR)
    assert_within(state[0], data["state_out"], OPERATOR)


def test_kda_layer8() -> None:
    data = operator("kda_layer8")
    layer = with_weights(KdaAttention(CONFIG), data)
    assert_within(layer(data["in"]), data["out"], OPERATOR)
    for pieces in ([8], [1] * 8, [3, 1, 4]):
        state = KdaState(memory=torch.zeros(1, 4, 16, 16), tail=torch.zeros(1, 3, 3 * 64))
        outputs = [layer(part, state) for part in data["in"].split(pieces, dim=1)]
        assert_within(torch.cat(outputs, dim=1), data["out"], OPERATOR)
        assert_within(state.memory, data["state_out"], OPERATOR)


def test_router() -> None:
    data = operator("router")
    experts, weights = with_weights(Router(CONFIG), data, prefix="gate.")(data["in"])
    spread = torch.zeros(6, 8).scatter(1, experts, weights)
    assert_within(spread, torch.zeros(6, 8).scatter(1, data["topk_idx"], data["topk_weight"]), OPERATOR)


def test_attnres() -> None:
    data = operator("attnres")
    norm, proj = RMSNorm(128, 1e-5), linear(128, 1)
    with_weights(norm, data, prefix="res_norm."), with_weights(proj, data, prefix="res_proj.")
    blocks = [block[None] for block in data["block_residual"].unbind(1)]
    assert_within(mix_residuals(data["prefix_sum"][None], blocks, norm, proj)[0], data["out"], OPERATOR)


def test_mla() -> None:
    data = operator("mla")
    layer = with_weights(MlaAttention(CONFIG), data)
    assert_within(layer(data["in"]), data["out"], OPERATOR)
    for pieces in ([6], [1] * 6, [3, 1, 2]):
        state = MlaState(latent=torch.zeros(1, 6, 32 + 8))
        outputs = [layer(part, state) for part in data["in"].split(pieces, dim=1)]
        assert_within(torch.cat(outputs, dim=1), data["out"], OPERATOR)
        assert_within(state.latent, torch.cat([data["kv_latent"], data["k_rope"]], dim=-1), OPERATOR)


def test_moe() -> None:
    data = operator("moe")
    assert_within(with_weights(LatentMoe(CONFIG), data)(data["in"]), data["out"], OPERATOR)


@pytest.mark.parametrize("name", ["layer_kda", "layer_mla"])
def test_decoder_layers(name: str) -> None:
    data = operator(name)
    layer = with_weights(DecoderLayer(CONFIG, reference_data.operators()[name]["layer_idx"]), data)
    h, blocks = layer(data["in"], [block[None] for block in data["block_residual_in"].unbind(1)])
    assert_within(h, data["out"], OPERATOR)
    assert_within(torch.cat(blocks).transpose(0, 1), data["block_residual_out"], OPERATOR)


def test_every_operator_has_a_test() -> None:
    tested = {name.removeprefix("test_") for name in globals()} | {"layer_kda", "layer_mla"}
    assert set(reference_data.operators()) <= tested
