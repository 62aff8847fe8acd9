"""Finding and loading the compiled operations; without them PyTorch computes the same, more slowly."""

import ctypes
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

MODULE = "kimik3_cli.engine.native.compiled"
INTERFACE = 1  # of rows.c
FUNCTIONS = {
    "rms_norm": "nnPnPffPn",
    "mixed_norm": "nnnPPfPffP",
    "gated": "nnPnPnffP",
    "short_conv": "nnnnPPPnP",
    "log_decay": "nnnPPPifP",
    "products": "nnPPPPP",
    "routed_experts": "nnnniifPnnPPPffPPPPPPP",
    "kda_chunks": "nnnnnnPPPPPPPP",
    "kda_token": "nnnnPnPPnPnPPifPfPP",
    "mla_token": "nnnnnnfPnPPnnPPPPnn",
}
TYPES = {"n": c_int64, "i": c_int, "f": c_float, "P": c_void_p}


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled operations; None where they were not built, or for another version of this package."""
    spec = find_spec(MODULE)
    if spec is None or spec.origin is None:
        return None
    loaded = ctypes.CDLL(spec.origin)
    if c_int32.in_dll(loaded, "INTERFACE").value != INTERFACE:
        return None
    for name, arguments in FUNCTIONS.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = [TYPES[each] for each in arguments], None
    loaded.kda_chunks_work.argtypes, loaded.kda_chunks_work.restype = [c_int64] * 5, c_int64
    return loaded


def loaded() -> ctypes.CDLL:
    """Return the compiled operations, which `computes` has found."""
    found = library()
    assert found is not None
    return found


def has_threads() -> bool:
    """Say whether the compiled operations can share work among PyTorch's threads; without them, products stay there."""
    found = library()
    return found is not None and bool(found.can_share_work())


def why_not_native() -> str | None:
    """Return why models run on the CPU without the compiled operations; None when these are there."""
    if library() is not None:
        return None
    return "the compiled operations are missing, so the CPU is slower; install a C compiler, then kimik3 again"


def computes(x: Tensor) -> bool:
    """Say whether the compiled operations take tensors like this one: float32 on the CPU."""
    return x.device.type == "cpu" and x.dtype is torch.float32 and library() is not None
