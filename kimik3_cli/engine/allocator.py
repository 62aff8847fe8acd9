"""How this process's C allocator treats the tensors that a forward pass makes and drops."""

import ctypes
import sys

# glibc's <malloc.h>
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_KEPT_BLOCK, KEPT_IN_ALL = 32 << 20, 512 << 20


def keep_freed_memory() -> None:
    """Let glibc keep freed blocks of up to 32 MiB, 512 MiB in all, instead of giving them back to the kernel.

    Tensors of some megabytes would otherwise be mapped and faulted in anew by every operation of a prefill, which costs
    as much as the arithmetic. Affects the whole process, so programs call it, not library functions. Without effect
    where the C library is not glibc.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BLOCK)
        mallopt(M_TRIM_THRESHOLD, KEPT_IN_ALL)
