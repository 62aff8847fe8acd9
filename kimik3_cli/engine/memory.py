"""Whether a model fits into memory, and what would hold it if it does not. Torch-free."""

import math
import os

from kimik3_cli.engine.config import FLOAT32_BYTES, KimiK3Config
from kimik3_cli.results import MemoryNeeds, sized

BFLOAT16_BYTES = 2
GPU_BYTES = 80 * 10**9
GPU_SHARE = 0.9  # of a GPU's memory that weights can have; the rest is for caches and work


def machine_bytes() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_needs(config: KimiK3Config, parameters: int, stored_bytes: int) -> MemoryNeeds:
    """Return what inference of a model needs, beside what this machine has.

    Args:
        config: the architecture.
        parameters: how many the model has.
        stored_bytes: what they take in the file or directory.
    """
    weights, fixed, machine = parameters * FLOAT32_BYTES, config.cache_bytes_fixed(), machine_bytes()
    fits = weights + fixed <= machine
    return MemoryNeeds(
        weights_bytes=weights,
        cache_bytes_fixed=fixed,
        cache_bytes_per_token=config.cache_bytes_per_token(),
        machine_bytes=machine,
        fits=fits,
        **({} if fits else {"advice": _advice(weights, parameters * BFLOAT16_BYTES, stored_bytes, machine)}),
    )


def _advice(weights: int, half: int, stored: int, machine: int) -> str:
    smallest = min(half, stored)
    gpus = math.ceil(smallest / (GPU_BYTES * GPU_SHARE))
    how = "as stored" if stored < half else "in bf16"
    need = f"the weights need {sized(weights)} in fp32 and {sized(half)} in bf16; this machine has {sized(machine)}"
    return f"{need}. {sized(smallest)} {how} take {gpus} GPUs of {sized(GPU_BYTES)}: see docs/interop.md"
