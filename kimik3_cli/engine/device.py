"""Where and how a model runs: device, precision, KDA backend. Resolve or refuse, never fall back in silence."""

import re
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

from kimik3_cli.engine.kda.dispatch import why_not_fused
from kimik3_cli.engine.native.library import why_not_native
from kimik3_cli.errors import DeviceError, RequestError


def resolve_device(name: str) -> torch.device:
    """Turn auto, cpu, cuda or cuda:N into a device of this machine; auto takes CUDA when it is available, else CPU.

    Raises:
        RequestError: (a ValueError) the name is none of these.
        DeviceError: (a ValueError) the CUDA device is not there.
    """
    if not isinstance(name, str):
        raise RequestError(f"--device is {name!r}; give auto, cpu, cuda or cuda:N")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    match = re.fullmatch(r"cuda(?::(\d+))?", name, flags=re.ASCII)
    if match is None:
        raise RequestError(f"--device is {name!r}; give auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise DeviceError(f"--device is {name!r}, but no CUDA device is available here; give cpu or auto")
    if match[1] is not None and int(match[1]) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise DeviceError(
            f"--device is {name!r}, but this machine has {count} CUDA device(s), cuda:0 to cuda:{count - 1}"
        )
    return torch.device(name)


def warn_if_slow(device: torch.device) -> None:
    """Warn that a model will run on the CPU without the compiled operations, where that is so."""
    reason = why_not_native() if device.type == "cpu" else None
    if reason:
        warnings.warn(reason, stacklevel=2)


def check_precision(device: torch.device, precision: str) -> None:
    """Refuse a precision that does not exist or that the device cannot honour.

    Raises:
        RequestError: (a ValueError) precision is neither fp32 nor bf16.
        DeviceError: (a ValueError) bf16 off CUDA or on CUDA hardware without it.
    """
    if precision not in ("fp32", "bf16"):
        raise RequestError(f"--precision is {precision!r}; give fp32 or bf16")
    if precision == "bf16" and device.type != "cuda":
        raise DeviceError(
            f"--precision is 'bf16', but bf16 runs on CUDA only and the device is {str(device)!r}; give fp32"
        )
    if precision == "bf16":
        with torch.cuda.device(device):
            supported = torch.cuda.is_bf16_supported(including_emulation=False)
        if not supported:
            raise DeviceError(f"--precision is 'bf16', but {torch.cuda.get_device_name(device)} lacks bf16; give fp32")


def inference_autocast(device: torch.device | str, precision: str) -> AbstractContextManager[object]:
    """Return the context that a forward pass runs in: none for fp32, autocast to bfloat16 for bf16.

    Raises:
        RequestError, DeviceError: see `check_precision`.
    """
    device = torch.device(device)
    check_precision(device, precision)
    if precision == "fp32":
        return nullcontext()
    return torch.autocast("cuda", dtype=torch.bfloat16)


def resolve_backend(
    name: str | None, device: torch.device, head_dim: int | None = None
) -> Literal["chunkwise", "fused"]:
    """Return the KDA backend: None takes fused where it can run, else chunkwise.

    Args:
        name: chunkwise, fused or None.
        device: where the model will run.
        head_dim: of the model's KDA heads; None while the model is not known yet, which leaves its condition out.

    Raises:
        RequestError: (a ValueError) the name is neither.
        DeviceError: (a ValueError) fused was asked for and cannot run; the message names the first unmet condition.
    """
    if name not in (None, "chunkwise", "fused"):
        raise RequestError(f"--backend is {name!r}; give chunkwise or fused")
    if name == "chunkwise":
        return "chunkwise"
    reason = why_not_fused(device, head_dim)
    if name is None:
        return "chunkwise" if reason else "fused"
    if reason:
        raise DeviceError(f"--backend is 'fused', but {reason}; give chunkwise")
    return "fused"
