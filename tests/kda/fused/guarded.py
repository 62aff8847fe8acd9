"""Memory that shows a wrong access: NaN where nothing was written yet, guard values on both sides of every tensor."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

GUARD = 64
"""Guard elements on each side: half of them 1e30, half NaN; a multiple of what keeps a tensor aligned."""
_guard_values = torch.tensor([1e30, float("nan")]).repeat(GUARD // 2)
_empty = torch.empty


def between_guards(values: Tensor) -> Tensor:
    """A contiguous copy of `values` whose neighbours in memory are guards."""
    memory = _guard_values.to(values).repeat(2)
    memory = torch.cat([memory[:GUARD], values.flatten(), memory[GUARD:]])
    return memory[GUARD : GUARD + values.numel()].view(values.shape)


def assert_guards(tensor: Tensor) -> None:
    """The guards around a tensor made by `between_guards` are as they were."""
    start = tensor.storage_offset()
    memory = tensor.as_strided((start + tensor.numel() + GUARD,), (1,), 0)
    expected = _guard_values.to(tensor)
    for guard in (memory[start - GUARD : start], memory[start + tensor.numel() :]):
        assert torch.equal(guard.nan_to_num(0.0), expected.nan_to_num(0.0)), "a guard was overwritten"


@contextmanager
def plain_allocations() -> Iterator[None]:
    """Let `torch.empty` be itself inside `watched_allocations`: filling memory would count as work."""
    watched = torch.empty
    torch.empty = _empty
    try:
        yield
    finally:
        torch.empty = watched


@contextmanager
def watched_allocations() -> Iterator[None]:
    """Let `torch.empty` give NaN between guards, and check the guards at the end."""
    made: list[Tensor] = []

    def poisoned(*shape: int | Sequence[int], **options: Any) -> Tensor:
        made.append(between_guards(torch.full_like(_empty(*shape, **options), float("nan"))))
        return made[-1]

    torch.empty = poisoned  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.empty = _empty
    for tensor in made:
        assert_guards(tensor)
