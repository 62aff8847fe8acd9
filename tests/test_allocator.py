"""Freed memory of tensor size is used again instead of being given back and faulted in anew."""

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


def count(mode: str) -> int:
    done = subprocess.run([sys.executable, "-c", FAULTS, mode], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_tensors_of_megabytes_cost_few_page_faults() -> None:
    assert count("kept") < count("given back") / 10
