"""What this machine can do at best: memory bandwidth and matrix rate, measured once at the same thread count."""

import re
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

READ_BYTES = 1 << 30
MATRIX_SIZE = 2048
REPEATS = 5


def median_seconds(work: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Median wall time of `work` after one warm-up, the device drained before the clock is read."""
    times = []
    for repeat in range(repeats + 1):
        start = time.perf_counter()
        work()
        synchronise(device)
        if repeat:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def synchronise(device: torch.device) -> None:
    """Wait until a CUDA device has done its work; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second of reading 1 GiB of float32 once, as a matrix-vector product reads weights."""
    columns = 4096
    weights = torch.ones(READ_BYTES // 4 // columns, columns, device=device)
    vector = torch.ones(columns, device=device)
    return READ_BYTES / median_seconds(lambda: weights @ vector, device)


def matrix_rate(device: torch.device) -> float:
    """Float32 operations a second (a multiply-add counts 2) of a square matrix product of 2048."""
    a = torch.ones(MATRIX_SIZE, MATRIX_SIZE, device=device)
    return 2 * MATRIX_SIZE**3 / median_seconds(lambda: a @ a, device)


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory so far: what a CUDA device has allocated; on the CPU, what was resident of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "linux":  # where ru_maxrss counts what the starting process held
        peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
        if peak:
            return int(peak[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
