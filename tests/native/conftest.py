"""Every operation with one thread and with several, whatever the test run has."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the test with each number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)
