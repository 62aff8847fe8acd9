"""CPU time of commands, and a unit to judge it by: machines, and the moments of one, differ by a factor of two."""

import resource
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path


def cpu_seconds(command: Sequence[str | Path]) -> float:
    """CPU time of a command and all that it starts; other work on the machine counts little."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@cache
def torch_import_seconds() -> float:
    """The unit: CPU time of importing torch, best of three. About 1.2 s on a fast core."""
    return min(cpu_seconds([sys.executable, "-c", "import torch"]) for _ in range(3))
