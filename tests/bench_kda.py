"""Time and extra peak memory of the chunkwise KDA path against the torch fallback of transformers, same tensors.

    python tests/bench_kda.py

Each path runs in a process of its own for the memory figure, and in turn within one process for the ratio of times.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

from kimik3_cli.engine.kda.chunkwise import kda_chunkwise

BATCH, TIME, HEADS, SIZE, CHUNK, THREADS, REPEATS = 1, 2048, 12, 64, 64, 2, 5


def inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, TIME, HEADS, SIZE)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    g = -5 * torch.rand(shape, generator=generator)
    beta = torch.rand(shape[:3], generator=generator)
    return F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, g, beta


def ours(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return kda_chunkwise(q * SIZE**-0.5, k, v, g, beta, chunk_size=CHUNK)[0]


def theirs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return chunk_kimi_delta_attention(q, k, v, g, beta, chunk_size=CHUNK)[0]


PATHS: dict[str, Callable[..., Tensor]] = {"kimik3": ours, "transformers": theirs}


def peak_bytes() -> int:
    """Peak resident memory since the last `forget_peak` (Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def extra_peak_bytes(name: str) -> int:
    """Peak resident memory that one call adds, measured in a fresh process."""
    return int(subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, check=True).stdout)


def seconds(path: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> float:
    start = time.perf_counter()
    path(*tensors)
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(THREADS)
    tensors = inputs()
    if len(sys.argv) > 1:
        PATHS[sys.argv[1]](*(x[:, :CHUNK] for x in tensors))  # what is loaded or set up once does not count
        forget_peak()
        before = peak_bytes()
        PATHS[sys.argv[1]](*tensors)
        print(peak_bytes() - before)
        return
    difference = (ours(*tensors) - theirs(*tensors)).abs().max() / theirs(*tensors).abs().max()
    times: dict[str, list[float]] = {name: [] for name in PATHS}
    for _ in range(REPEATS):
        for name, path in PATHS.items():
            times[name].append(seconds(path, tensors))
    print(f"B={BATCH} T={TIME} H={HEADS} K=V={SIZE} chunk={CHUNK} threads={THREADS}, medians of {REPEATS}")
    print(f"largest relative difference of the outputs: {difference:.1e}")
    medians = {name: statistics.median(values) for name, values in times.items()}
    memory = {name: extra_peak_bytes(name) for name in PATHS}
    for name in PATHS:
        print(f"{name:>13}: {medians[name] * 1e3:8.1f} ms   extra peak memory {memory[name] / 1e6:8.1f} MB")
    print(f"        ratio: {medians['transformers'] / medians['kimik3']:.1f} times faster")
    print(f"               {memory['kimik3'] / memory['transformers']:.2f} of the extra peak memory")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
