"""Gates at the ends of their range and correlated keys: where careless kernels overflow or lose all digits."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from checkpoints import checkpoint, fill, ids, mini_config, mk
from comparison import CLEAR_ROUTING, assert_close, load
from oracle import oracle_run
from torch import Tensor

from kimik3_cli.engine.generation import next_token_logits

LENGTHS = (1, 17, 64, 65, 200)
# Name -> (value of every dt_bias, gate_lower_bound).
GATES: dict[str, tuple[float, float | None]] = {
    "all at the bound": (20.0, -5.0),
    "all deep without a bound": (20.0, None),
    "about -60 without a bound": (40.0, None),
    "all near zero": (-12.0, -5.0),
    "all near zero without a bound": (-12.0, None),
    "a bound deeper than float32 can hold at once": (20.0, -90.0),
}


def config(gates: str, chunk_size: int = 64) -> dict[str, Any]:
    return mini_config({"kda_chunk_size": chunk_size}, {"gate_lower_bound": GATES[gates][1]})


@cache
def expected(gates: str) -> Tensor:
    """The float64 logits of every prefix; they do not depend on the chunk size."""
    made = checkpoint(config(gates))
    fill("dt_bias", GATES[gates][0])(made)
    run = oracle_run(made, ids(max(LENGTHS)))
    assert run.routing_gap > CLEAR_ROUTING
    return run.logits


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("chunk_size", [16, 64, 256])
def test_gates(gates: str, chunk_size: int, tmp_path: Path) -> None:
    mk(tmp_path / "gates.pt", config(gates, chunk_size), fill("dt_bias", GATES[gates][0]))
    model = load(tmp_path / "gates.pt")
    for length in LENGTHS:
        prompt = ids(max(LENGTHS))[:length]
        assert_close(next_token_logits(model, prompt), expected(gates)[length - 1])


def correlate_keys(made: dict[str, Any]) -> None:
    """Nothing is forgotten, and beta is 0 or 1: with one repeated token all keys of a chunk are equal."""
    fill("dt_bias", -12.0)(made)
    for name, tensor in made["model"].items():
        if name.endswith("self_attn.b_proj.weight"):
            tensor *= 50


@pytest.mark.parametrize("token_ids", [[9] * 200, [9, 33] * 100, ids(8) * 25, ids(3) + [9] * 197])
@pytest.mark.parametrize("chunk_size", [16, 64, 256])
def test_correlated_keys(token_ids: list[int], chunk_size: int, tmp_path: Path) -> None:
    made = mk(tmp_path / "corr.pt", {"kda_chunk_size": chunk_size}, correlate_keys)
    run = oracle_run(made, token_ids)
    assert run.routing_gap > CLEAR_ROUTING
    model = load(tmp_path / "corr.pt")
    for length in (130, 200):
        assert_close(next_token_logits(model, token_ids[:length]), run.logits[length - 1])
