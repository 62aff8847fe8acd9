"""Operands in the shapes that callers pass, and how close a compiled operation has to come to float64."""

import torch
from torch import Tensor

BOUND = 2e-5
BEYOND_THREADS = 40_000
"""More numbers than the compiled operations leave to one thread."""


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal float32 numbers."""
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows_apart(x: Tensor, gap: int = 5) -> Tensor:
    """The same rows [N,X], with NaN between them, which no result may see."""
    wide = torch.full((len(x), x.shape[1] + gap), float("nan"))
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def untouched(*shape: int) -> Tensor:
    """Memory in which every number that is not written shows."""
    return torch.full(shape, float("nan"))


def assert_rows_close(actual: Tensor, expected: Tensor, bound: float = BOUND) -> None:
    """Finite, and each row [...,X] within `bound` of its own largest number, not of the largest of all rows."""
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    largest = expected.double().abs().amax(-1, keepdim=True).clamp(min=1e-30)
    error = ((actual.double() - expected.double()).abs() / largest).max().item()
    assert error <= bound, f"relative error {error:.2e}"
