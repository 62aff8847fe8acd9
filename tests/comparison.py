"""Compares a checkpoint run by the package with the float64 model of these tests."""

from collections.abc import Sequence
from os import PathLike
from typing import Any

import torch
from oracle import OracleRun, oracle_run
from torch import Tensor

from kimik3_cli.engine.cache import DecodeCache
from kimik3_cli.engine.checkpoint.load import load_checkpoint_model
from kimik3_cli.engine.generation import next_token_logits
from kimik3_cli.engine.model.decoder import KimiK3
from kimik3_cli.engine.model.step import DecodeStep

CLOSE = 1e-4
"""Logits are close when max|difference| <= CLOSE * max|logit|."""
SAME = 2e-6
"""The same numbers lie elsewhere in memory: products of one row may then sum in another order."""
CLEAR_ROUTING = 1e-5
"""Below this distance between two experts' scores, float32 may rightly choose another expert than float64."""


def load(path: str | PathLike[str], backend: str = "chunkwise") -> KimiK3:
    """The model of a checkpoint file, through the package's own loader."""
    return load_checkpoint_model(path, "cpu", backend)[0]


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """max|difference| / max|expected|; the shapes must agree and `actual` be finite."""
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    return ((actual.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def assert_close(actual: Tensor, expected: Tensor, bound: float = CLOSE) -> None:
    difference = relative_difference(actual, expected)
    assert difference <= bound, f"relative difference {difference:.2e}"


def assert_matches_oracle(path: str | PathLike[str], checkpoint: dict[str, Any], ids: Sequence[int]) -> Tensor:
    """The file's next-token logits are the float64 model's; returns the latter."""
    run = oracle_run(checkpoint, ids)
    assert run.routing_gap > CLEAR_ROUTING, "an ambiguous choice of experts: use another seed"
    assert_close(next_token_logits(load(path), list(ids)), run.logits[-1])
    return run.logits[-1]


@torch.no_grad()
def assert_matches_run(model: KimiK3, ids: Sequence[int], run: OracleRun) -> None:
    """The model's logits are the float64 run's, at every position and for the next token."""
    assert_close(model(torch.tensor([list(ids)]))[0], run.logits)
    assert_close(next_token_logits(model, list(ids)), run.logits[-1])


@torch.no_grad()
def both_ways(model: KimiK3, rows: Tensor, prefix: int) -> tuple[Tensor, Tensor]:
    """Hidden states of the tokens after `prefix`: by the one-token pass, and by the general pass with a cache."""
    caches = [DecodeCache(model.config, len(rows), rows.shape[1]) for _ in range(2)]
    for cache in caches:
        model.hidden(rows[:, :prefix], cache)
    step = DecodeStep(model, len(rows))
    one_by_one = torch.stack([step.hidden(ids_t, caches[0]).clone() for ids_t in rows[:, prefix:].unbind(1)], dim=1)
    together = torch.cat([model.hidden(ids_t[:, None], caches[1]) for ids_t in rows[:, prefix:].unbind(1)], dim=1)
    return one_by_one, together
