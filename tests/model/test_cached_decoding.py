"""The state carried between calls: however a sequence is cut, it is the state and the logits of one pass."""

from itertools import pairwise
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


def ways_to_cut(config: dict[str, Any], length: int, cuts: list[int]) -> dict[str, list[int]]:
    """Name -> pieces of `length` tokens: at the edges of the convolution's history and of chunks, and at `cuts`."""
    chunk = config.get("kda_chunk_size", 64)
    kernel = config["linear_attn_config"].get("short_conv_kernel_size", 4)
    sizes = {"one token": 1, "kernel - 1": kernel - 1, "chunk - 1": chunk - 1, "chunk": chunk, "chunk + 1": chunk + 1}
    even = {
        name: [min(size, length - start) for start in range(0, length, size)] for name, size in sizes.items() if size
    }
    edges = [0, *sorted({cut % length for cut in cuts} - {0}), length]
    return even | {"random": [stop - start for start, stop in pairwise(edges)]}


@settings(REPEATABLE, max_examples=40)
@given(
    config=model_configs(),
    length=st.integers(1, 140),
    cuts=st.lists(st.integers(0, 139), max_size=4),
    seed=st.integers(0, 99),
)
def test_every_way_to_cut_a_prompt_is_one_pass(
    config: dict[str, Any], length: int, cuts: list[int], seed: int, folder: Path
) -> None:
    """To 2e-5 of the largest logit, for models that float32 itself answers well: others only amplify its rounding."""
    made, token_ids = checkpoint(config, seed), ids(length, config["vocab_size"], seed)
    run = oracle_run(made, token_ids)
    torch.save(made, folder / "cut.pt")
    model = load(folder / "cut.pt")
    one_pass = model(torch.tensor([token_ids]))[0, -1]
    assume(run.routing_gap > CLEAR_ROUTING and relative_difference(one_pass, run.logits[-1]) < 5e-6)
    for pieces in ways_to_cut(config, length, cuts).values():
        assert_close(fed(model, token_ids, pieces)[0], one_pass, 2e-5)


@settings(REPEATABLE, max_examples=25)
@given(
    config=model_configs(),
    length=st.integers(1, 70),
    seed=st.integers(0, 99),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_p=st.sampled_from([0.6, 1.0]),
)
def test_any_configuration_writes_the_same_with_and_without_a_cache(
    config: dict[str, Any], length: int, seed: int, temperature: float, top_p: float, folder: Path
) -> None:
    made, prompt = checkpoint(config, seed), ids(length, config["vocab_size"], seed)
    assume(oracle_run(made, prompt).routing_gap > CLEAR_ROUTING)
    torch.save(made, folder / "same.pt")
    model = load(folder / "same.pt")
    for mode in ("greedy", "sample"):
        options = {"mode": mode, "temperature": temperature, "top_p": top_p, "seed": seed, "max_new_tokens": 8}
        cached, recomputed = (generate_tokens(model, prompt, use_cache=use, **options) for use in (True, False))
        assert cached == recomputed


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
