"""A whole model on the fused path is the model on the chunkwise path: prefill, decoding, states handed over."""

from typing import Any

import pytest
import torch
from checkpoints import checkpoint, ids, mini_config
from comparison import assert_close, load
from triton_interpreter import recorded_launches

from kimik3_cli.engine.cache import DecodeCache, KdaState
from kimik3_cli.engine.generation import generate_tokens
from kimik3_cli.engine.model.decoder import KimiK3
from kimik3_cli.engine.model.step import DecodeStep

LAYERS = {"num_hidden_layers": 3}
KDA = {"kda_layers": [1, 3], "full_attn_layers": [2]}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "k3": (LAYERS, KDA),
    "kimi linear": (
        LAYERS
        | {
            "hidden_act": "silu",
            "attn_res_block_size": None,
            "q_lora_rank": None,
            "mla_use_output_gate": False,
            "routed_expert_hidden_size": None,
        },
        KDA | {"gate_lower_bound": None, "use_full_rank_gate": False},
    ),
    "k3, heads of 24, no convolution history": (LAYERS, KDA | {"head_dim": 24, "short_conv_kernel_size": 1}),
}
PROMPT, NEW = 18, 4


class Pair(dict[str, KimiK3]):
    """The same weights on both backends."""


@pytest.fixture(scope="module", params=MODELS)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = tmp_path_factory.mktemp("fused") / "model.pt"
    torch.save(checkpoint(mini_config(*MODELS[request.param])), path)
    chunkwise = load(path)
    fused = KimiK3(chunkwise.config.with_backend("fused")).requires_grad_(False).eval()
    fused.load_state_dict(chunkwise.state_dict())
    return Pair(chunkwise=chunkwise, fused=fused)


def run(prefill: KimiK3, decode: KimiK3, rows: torch.Tensor) -> tuple[torch.Tensor, DecodeCache]:
    """Hidden states [B,T,D] of a prompt by one model and of what follows by another, on one cache."""
    cache = DecodeCache(prefill.config, *rows.shape)
    hidden = [prefill.hidden(rows[:, :PROMPT], cache)]
    step = DecodeStep(decode, len(rows))
    hidden += [step.hidden(ids_t, cache).clone()[:, None] for ids_t in rows[:, PROMPT:].unbind(1)]
    return torch.cat(hidden, dim=1), cache


@pytest.mark.parametrize("prefill", ["chunkwise", "fused"])
@pytest.mark.parametrize("decode", ["chunkwise", "fused"])
def test_states_are_handed_from_path_to_path(models: Pair, prefill: str, decode: str) -> None:
    rows = torch.tensor([ids(PROMPT + NEW, seed=seed) for seed in range(2)])
    expected, expected_cache = run(models["chunkwise"], models["chunkwise"], rows)
    hidden, cache = run(models[prefill], models[decode], rows)
    assert_close(hidden, expected, 1e-5)
    for state, other in zip(cache.states, expected_cache.states, strict=True):
        if isinstance(state, KdaState) and isinstance(other, KdaState):
            assert_close(state.memory, other.memory, 1e-5)
            if state.tail.numel():
                assert_close(state.tail, other.tail, 1e-5)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_same_tokens_from_short_prompts(models: Pair, length: int) -> None:
    chunkwise, fused = (
        generate_tokens(models[backend], ids(length), max_new_tokens=5, eos_id=63) for backend in ("chunkwise", "fused")
    )
    assert fused == chunkwise


def test_logits_without_a_cache(models: Pair) -> None:
    rows = torch.tensor([ids(17, seed=seed) for seed in range(2)])
    assert_close(models["fused"](rows), models["chunkwise"](rows), 1e-5)


def test_a_prompt_in_pieces(models: Pair) -> None:
    """Several calls of many tokens on one cache, and one token through the general pass."""
    rows = torch.tensor([ids(22)])
    cache = DecodeCache(models["fused"].config, 1, 22)
    hidden = torch.cat([models["fused"].hidden(part, cache) for part in rows.split([5, 16, 1], dim=1)], dim=1)
    assert_close(hidden, models["chunkwise"].hidden(rows), 1e-5)


def test_launches_of_a_request(models: Pair) -> None:
    """Two kernels a KDA layer for the prompt, one a KDA layer for each token."""
    rows = torch.tensor([ids(3, seed=seed) for seed in range(2)])
    model = models["fused"]
    cache, step = DecodeCache(model.config, 2, 6), DecodeStep(model, 2)
    with recorded_launches() as launches:
        model.hidden(rows, cache)
    assert [launch.kernel for launch in launches] == 2 * ["chunk_local", "chunk_walk"]
    for _ in range(2):
        with recorded_launches() as launches:
            step(rows[:, 0], cache)
        assert [launch.kernel for launch in launches] == 2 * ["decode_token"]


def test_autocast_changes_no_more_than_on_the_chunkwise_path(models: Pair) -> None:
    """Under bf16 both paths get the same rounded projections; state and gates stay in float32."""
    rows = torch.tensor([ids(18)])
    with torch.autocast("cpu", torch.bfloat16):
        hidden = {name: model.hidden(rows) for name, model in models.items()}
    assert_close(hidden["fused"], hidden["chunkwise"], 2e-2)
