"""The compiled operations on tensors, all float32 on the CPU; PyTorch's own versions stand beside the callers.

Each writes to `out`. Rows may lie apart, but the numbers of a row side by side; everything else is contiguous.

Letters: B sequences, D hidden size, I inner width, N rows, H heads, K head size, c convolution kernel.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kimik3_cli.engine.native.library import loaded


def rms_norm(x: Tensor, weight: Tensor, floor: float, out: Tensor) -> None:
    """x / hypot(|x|, floor) * weight: x [N,D], weight [D], out [N,D], which may be x."""
    loaded().rms_norm(
        *x.shape, x.data_ptr(), x.stride(0), weight.data_ptr(), floor, out.data_ptr(), out.stride(0)
    )


def mixed_norm(
    sources: Sequence[Tensor], query: Tensor, mix_floor: float, weight: Tensor, floor: float, out: Tensor
) -> None:
    """`rms_norm` of the depth mix of sources [B,D]: softmax over them of source / hypot(|source|, mix_floor) . query."""
    addresses = (ctypes.c_void_p * len(sources))(*[source.data_ptr() for source in sources])
    query_at, weight_at, out_at = query.data_ptr(), weight.data_ptr(), out.data_ptr()
    loaded().mixed_norm(len(sources), *out.shape, addresses, query_at, mix_floor, weight_at, floor, out_at)


def silu_gated(both: Tensor, out: Tensor) -> None:
    """SiLU(gate) * up: gate and up side by side in both [N,2*I], out [N,I]."""
    loaded().silu_gated(*out.shape, both.data_ptr(), out.data_ptr())


def situ_gated(both: Tensor, out: Tensor, cap: float, up_cap: float | None) -> None:
    """SiTU of gate and up side by side in both [N,2*I], out [N,I]; up_cap None leaves `up` as it is."""
    loaded().situ_gated(*out.shape, both.data_ptr(), cap, up_cap or 0.0, out.data_ptr())


def kda_token(
    qkv: Tensor,
    z: Tensor,
    beta: Tensor,
    gate: Tensor,
    taps: Tensor,
    rate: Tensor,
    lower_bound: float | None,
    out_weight: Tensor,
    out_floor: float,
    tail: Tensor,
    memory: Tensor,
    out: Tensor,
) -> None:
    """Compute what `kda_decode` computes, with its arguments; rate [H], out [B,H,K]."""
    mixed = torch.empty(qkv.shape[1])
    loaded().kda_token(
        *z.shape,
        len(taps),
        qkv.data_ptr(),
        qkv.stride(0),
        z.data_ptr(),
        beta.data_ptr(),
        beta.stride(0),
        gate.data_ptr(),
        gate.stride(0),
        taps.data_ptr(),
        rate.data_ptr(),
        lower_bound is not None,
        lower_bound or 0.0,
        out_weight.data_ptr(),
        out_floor,
        tail.data_ptr(),
        memory.data_ptr(),
        mixed.data_ptr(),
        out.data_ptr(),
    )
