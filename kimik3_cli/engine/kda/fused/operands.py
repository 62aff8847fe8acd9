"""What the host functions of the fused path accept: shapes, dtypes, devices, memory order."""

from collections.abc import Mapping
from typing import Any

import torch
import triton
from torch import Tensor

from kimik3_cli.engine.kda.fused.launch import ALIGNMENT, LARGEST_HEAD, SMALLEST_HEAD
from kimik3_cli.errors import DeviceError, RequestError

ACTIVATION_DTYPES = (torch.float32, torch.bfloat16)


def check_operands(tensors: Mapping[str, tuple[Tensor, tuple[int, ...]]], kernel: Any) -> None:
    """Check named tensors, each with the shape that it must have, against what `kernel` can run on.

    Raises:
        RequestError: (a ValueError) a shape is wrong, or a dtype neither float32 nor bfloat16.
        DeviceError: (a ValueError) the tensors are not all on one CUDA device; on the CPU kernels run in Triton's
            interpreter alone. Or gradients are wanted, which the kernels do not compute.
    """
    first_name, (first, _) = next(iter(tensors.items()))
    for name, (tensor, shape) in tensors.items():
        if tensor.shape != shape:
            raise RequestError(f"{name} has the shape {list(tensor.shape)}; the fused path needs {list(shape)} here")
        if tensor.dtype not in ACTIVATION_DTYPES:
            raise RequestError(f"{name} is {tensor.dtype}; the fused path takes torch.float32 and torch.bfloat16")
        if tensor.device != first.device:
            raise DeviceError(
                f"{name} is on {tensor.device} and {first_name} on {first.device}; put both on one device"
            )
        if tensor.requires_grad and torch.is_grad_enabled():
            raise DeviceError(f"{name} requires a gradient; the fused path computes none, use chunkwise")
    interpreted = not isinstance(kernel, triton.JITFunction)
    if first.device.type != ("cpu" if interpreted else "cuda"):
        raise DeviceError(
            f"the fused path needs a CUDA device, or the CPU with TRITON_INTERPRET=1; {first_name} is on {first.device}"
        )


def check_head_sizes(*sizes: int) -> None:
    """Refuse head sizes that the kernels do not have.

    Raises:
        DeviceError: (a ValueError) a size is out of range.
    """
    for size in sizes:
        if not SMALLEST_HEAD <= size <= LARGEST_HEAD:
            raise DeviceError(
                f"the head size is {size}; the fused path has {SMALLEST_HEAD} to {LARGEST_HEAD}, use chunkwise"
            )


def in_one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors as they are when all have one dtype, else all in float32."""
    if all(tensor.dtype is tensors[0].dtype for tensor in tensors):
        return tensors
    return tuple(tensor.float() for tensor in tensors)


def packed(tensor: Tensor) -> Tensor:
    """Return the tensor in one aligned piece, copied only when it is not."""
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def packed_fp32(tensor: Tensor) -> Tensor:
    """Return `packed` of the tensor in float32."""
    return packed(tensor.float())


def token_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """Take [B,T,H,X] as rows of one token each; return it, and how many heads fit between two rows' starts.

    A slice of a wider projection, such as q out of q, k and v side by side, has longer rows than it needs and is used
    where it lies. Any other memory order is copied.
    """
    _, _, heads, size = tensor.shape
    rows = tensor.flatten(0, 1)  # [B*T,H,X], a view unless batch and time do not follow each other
    stride = rows.stride(0) if len(rows) > 1 else heads * size
    one_piece = rows.stride(2) == 1 and (heads == 1 or rows.stride(1) == size)
    if not one_piece or stride % size or rows.data_ptr() % ALIGNMENT:
        rows, stride = packed(rows), heads * size
    return rows, stride // size
