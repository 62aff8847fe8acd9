"""Freed memory of tensor size is used again instead of being given back and faulted in anew."""

import os
import subprocess
import sys

FAULTS = """
import resource, sys, torch
from kimik3_cli.engine.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
x = torch.ones(1_200_000)
def work():
    for _ in range(10):
        several = [x * 2 for _ in range(8)]
        del several
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
before = faults()
work()
print(faults() - before)
"""


# glibc's own start values; set, they no longer adapt themselves to what a run happens to allocate first
FIXED = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072", "OMP_NUM_THREADS": "1"}


def count(mode: str) -> int:
    command = [sys.executable, "-c", FAULTS, mode]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **FIXED})
    return int(done.stdout)


def test_tensors_of_megabytes_cost_few_page_faults() -> None:
    assert count("kept") < count("given back") / 10
