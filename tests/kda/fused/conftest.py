"""Every test here runs the kernels in Triton's interpreter, on memory that shows a wrong access."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import triton_interpreter  # noqa: F401  (prepares the interpreter)
from guarded import watched_allocations


@pytest.fixture(autouse=True)
def _watched_memory() -> Iterator[None]:
    """Fresh memory is NaN and lies between guards; no test may leave a guard changed.

    numpy warns of e^x = inf inside a sigmoid, whose reciprocal is the right 0.
    """
    with torch.no_grad(), np.errstate(over="ignore"), watched_allocations():
        yield
