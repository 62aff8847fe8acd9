"""Freed memory of tensor size is used again instead of being mapped and faulted in anew."""

import subprocess
import sys

FAULTS = """
import resource, sys, torch
from kimik3_cli.engine.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
x = torch.ones(1_200_000)
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    y = x * 2 + 1
before = faults()
for _ in range(20):
    y = x * 2 + 1
print(faults() - before)
"""


def test_tensors_of_megabytes_cost_few_page_faults() -> None:
    def count(mode: str) -> int:
        done = subprocess.run([sys.executable, "-c", FAULTS, mode], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert count("kept") < count("given back") / 3
