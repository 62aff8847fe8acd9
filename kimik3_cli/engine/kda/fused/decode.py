"""The fused decode: one launch for a token of a KDA layer between its projections.

Letters: B batch, H heads, K head size (keys and values alike), c convolution kernel.
"""

import torch
from torch import Tensor

from kimik3_cli.engine.kda.decode import KdaConstants
from kimik3_cli.engine.kda.fused.decode_kernel import decode_token
from kimik3_cli.engine.kda.fused.launch import ALIGNMENT, decode_launch
from kimik3_cli.engine.kda.fused.operands import check_head_sizes, check_operands, in_one_dtype, packed, packed_fp32
from kimik3_cli.errors import RequestError


def kda_decode_fused(
    qkv: Tensor, z: Tensor, beta: Tensor, gate: Tensor, constants: KdaConstants, tail: Tensor, memory: Tensor
) -> Tensor:
    """Compute what `kda_decode` computes; `tail` and `memory` are advanced in place.

    Args:
        qkv: [B,3*H*K], the projections before the convolution; float32 or bfloat16. K is 16 to 256.
        z: [B,H,K], dt_bias already added; like it.
        beta: [B,H], before the sigmoid; like it.
        gate: [B,H,K], before the sigmoid; like it.
        constants: of the layer.
        tail: [B,c-1,3*H*K] float32, the inputs before.
        memory: [B,H,K,K] float32.

    Returns:
        [B,H,K] float32.

    Raises:
        RequestError, DeviceError: (ValueErrors) see `check_operands`, `check_head_sizes`; or `tail` or `memory` cannot
            be advanced in place.
    """
    batch, heads, size = z.shape
    kernel, width = len(constants.taps), 3 * heads * size
    check_head_sizes(size)
    check_operands(
        {
            "qkv": (qkv, (batch, width)),
            "z": (z, (batch, heads, size)),
            "beta": (beta, (batch, heads)),
            "gate": (gate, z.shape),
            "taps": (constants.taps, (kernel, width)),
            "a_log": (constants.a_log, (heads,)),
            "out_weight": (constants.out_weight, (size,)),
            "tail": (tail, (batch, kernel - 1, width)),
            "memory": (memory, (batch, heads, size, size)),
        },
        decode_token,
    )
    for name, state in (("tail", tail), ("memory", memory)):
        if state.dtype != torch.float32 or not state.is_contiguous() or state.data_ptr() % ALIGNMENT:
            raise RequestError(f"{name} is advanced in place; give contiguous float32 that starts at {ALIGNMENT} bytes")
    qkv, z, beta, gate = (packed(x) for x in in_one_dtype(qkv, z, beta, gate))
    y = torch.empty(batch, heads, size, device=z.device)
    decode_token[(batch * heads,)](
        qkv,
        z,
        beta,
        gate,
        packed_fp32(constants.taps),
        packed_fp32(constants.a_log),
        packed_fp32(constants.out_weight),
        tail,
        memory,
        y,
        heads,
        size,
        kernel,
        0.0 if constants.lower_bound is None else constants.lower_bound,
        constants.out_floor,
        **decode_launch(size, constants.lower_bound is not None).arguments(),
    )
    return y
