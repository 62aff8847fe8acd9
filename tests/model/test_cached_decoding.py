"""The state carried between calls: however a sequence is cut, it is the state and the logits of one pass."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import checkpoint, ids, mini_config
from comparison import CLEAR_ROUTING, assert_close, load, relative_difference
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import OracleRun, oracle_run
from strategies import REPEATABLE, model_configs
from torch import Tensor

from kimik3_cli.engine.cache import DecodeCache, KdaState
from kimik3_cli.engine.generation import advance, generate_tokens
from kimik3_cli.engine.model.decoder import KimiK3

CUTS = {
    "one call": [130],
    "after a chunk": [64, 66],
    "after one token": [1, 129],
    "around a chunk": [63, 1, 1, 65],
    "token by token": [1] * 130,
    "shorter than the convolution": [2, 1, 127],
}
# Name -> replaced keys of the mini configuration, at the top level and inside linear_attn_config.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mini": ({}, {}),
    "softplus gate": ({}, {"gate_lower_bound": None}),
    "no convolution history": ({}, {"short_conv_kernel_size": 1}),
    "small chunks, plain residuals": ({"kda_chunk_size": 16, "attn_res_block_size": None}, {}),
    "full attention only": (
        {"q_lora_rank": None, "num_experts": None},
        {"kda_layers": [], "full_attn_layers": [1, 2, 3, 4, 5]},
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def model_and_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[KimiK3, OracleRun]:
    made = checkpoint(mini_config(*MODELS[request.param]))
    path = tmp_path_factory.mktemp("cached") / "model.pt"
    torch.save(made, path)
    run = oracle_run(made, ids(130))
    assert run.routing_gap > CLEAR_ROUTING
    return load(path), run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cut")


def fed(model: KimiK3, token_ids: list[int], pieces: list[int]) -> tuple[Tensor, DecodeCache]:
    """The logits after `token_ids`, fed in `pieces`, and the cache that they leave."""
    cache, start = DecodeCache(model.config, 1, len(token_ids)), 0
    for piece in pieces:
        logits = advance(model, token_ids[start : start + piece], cache)
        start += piece
    return logits, cache


def assert_states(cache: DecodeCache, run: OracleRun) -> None:
    """Every KDA layer's state, keys by values, and its convolution tails."""
    for layer, expected in run.kda_states.items():
        state = cache.states[layer]
        assert isinstance(state, KdaState)
        assert state.memory.dtype == state.tail.dtype == torch.float32
        assert_close(state.memory[0], expected)
        tails = torch.cat([run.conv_tails[layer][letter] for letter in "qkv"])
        if tails.numel():
            assert_close(state.tail[0].T, tails)


@pytest.mark.parametrize("pieces", CUTS)
def test_however_it_is_cut(pieces: str, model_and_run: tuple[KimiK3, OracleRun]) -> None:
    model, run = model_and_run
    logits, cache = fed(model, ids(130), CUTS[pieces])
    assert_close(logits, run.logits[-1])
    assert_states(cache, run)


def test_the_same_continuation_with_and_without_a_cache(model_and_run: tuple[KimiK3, OracleRun]) -> None:
    model, _ = model_and_run
    for length in (1, 2, 64, 65, 130):
        prompt = ids(130)[:length]
        cached, recomputed = (
            generate_tokens(model, prompt, max_new_tokens=20, eos_id=63, use_cache=use) for use in (True, False)
        )
        assert cached == recomputed


def test_a_transposed_state_would_be_seen() -> None:
    """Key and value sizes are equal, so only the numbers tell a state from its transpose."""
    for state in oracle_run(checkpoint(mini_config()), ids(130)).kda_states.values():
        assert relative_difference(state.transpose(1, 2), state) > 0.1


@torch.no_grad()
def test_rows_of_a_batch_do_not_see_each_other(model_and_run: tuple[KimiK3, OracleRun]) -> None:
    model, _ = model_and_run
    rows = torch.tensor([ids(51, seed=seed) for seed in range(3)])
    cache = DecodeCache(model.config, 3, 51)
    hidden = torch.cat([model.hidden(part, cache) for part in rows.split([20, 1, 30], dim=1)], dim=1)
    for row, together in zip(rows, hidden, strict=True):
        assert_close(together, model.hidden(row[None])[0])


@settings(REPEATABLE, max_examples=60)
@given(
    config=model_configs(),
    pieces=st.lists(st.integers(1, 50), min_size=1, max_size=5),
    seed=st.integers(0, 99),
)
def test_any_configuration_cut_anywhere(config: dict[str, Any], pieces: list[int], seed: int, folder: Path) -> None:
    made, token_ids = checkpoint(config, seed), ids(sum(pieces), config["vocab_size"], seed)
    run = oracle_run(made, token_ids)
    assume(run.routing_gap > CLEAR_ROUTING)
    torch.save(made, folder / "any.pt")
    logits, cache = fed(load(folder / "any.pt"), token_ids, pieces)
    assert_close(logits, run.logits[-1])
    assert_states(cache, run)
