"""Finding and loading the compiled operations; without them PyTorch computes the same, more slowly."""

import ctypes
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

MODULE = "kimik3_cli.engine.native.compiled"
INTERFACE = 1  # of operations.c
SIGNATURES = {
    "rms_norm": [c_int64, c_int64, c_void_p, c_int64, c_void_p, c_float, c_void_p, c_int64],
    "mixed_norm": [c_int64, c_int64, c_int64, c_void_p, c_void_p, c_float, c_void_p, c_float, c_void_p],
    "silu_gated": [c_int64, c_int64, c_void_p, c_void_p],
    "situ_gated": [c_int64, c_int64, c_void_p, c_float, c_float, c_void_p],
    "kda_token": [
        *[c_int64] * 4,
        *[c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_int64],
        *[c_void_p, c_void_p, c_int, c_float, c_void_p, c_float],
        *[c_void_p] * 4,
    ],
}


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled operations; None where they were not built, or for another version of this package."""
    spec = find_spec(MODULE)
    if spec is None or spec.origin is None:
        return None
    loaded = ctypes.CDLL(spec.origin)
    if c_int32.in_dll(loaded, "INTERFACE").value != INTERFACE:
        return None
    for name, arguments in SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    return loaded


def loaded() -> ctypes.CDLL:
    """Return the compiled operations, which `computes` has found."""
    found = library()
    assert found is not None
    return found


def why_not_native() -> str | None:
    """Return why decoding on the CPU runs without the compiled operations; None when it has them."""
    if library() is not None:
        return None
    return (
        "the compiled operations are missing, so decoding on the CPU is slower; install a C compiler, then kimik3 again"
    )


def computes(x: Tensor) -> bool:
    """Say whether the compiled operations take tensors like this one: float32 on the CPU."""
    return x.device.type == "cpu" and x.dtype is torch.float32 and library() is not None
