"""The fused prefill: two launches from raw gates to outputs and final state.

Letters: B batch, T time, H heads, K key channels, V value channels, C chunk, N chunks, M = B*H*N.
"""

from typing import get_args

import torch
from torch import Tensor

from kimik3_cli.engine.kda.fused.launch import CHUNK, INPUT_PRECISION, Precision, local_launch, padded, walk_launch
from kimik3_cli.engine.kda.fused.operands import (
    check_head_sizes,
    check_operands,
    in_one_dtype,
    packed,
    packed_fp32,
    token_rows,
)
from kimik3_cli.engine.kda.fused.prefill_kernels import chunk_local, chunk_walk
from kimik3_cli.errors import RequestError


def kda_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta_logits: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor | None = None,
    lower_bound: float | None = None,
    *,
    input_precision: Precision = INPUT_PRECISION,
) -> tuple[Tensor, Tensor]:
    """Gates, normalisation and delta rule of T >= 1 tokens, any length.

    The function is `kda_recurrent` of q, k normalised with `l2_normalise`, q also times K^-0.5, g from `log_decay` and
    beta from a sigmoid. Inputs of one dtype are read as they are; a mixture is read in float32. Everything is computed
    in float32.

    Args:
        q, k: [B,T,H,K], after the convolution, not normalised; float32 or bfloat16. K and V are 16 to 256.
        v: [B,T,H,V], like them.
        z: [B,T,H,K], before dt_bias is added; like them.
        beta_logits: [B,T,H], before the sigmoid; like them.
        a_log: [H].
        dt_bias: [H*K].
        initial_state: [B,H,K,V]; None starts from zero.
        lower_bound: see `log_decay`.
        input_precision: of the matrix products, see `INPUT_PRECISION`.

    Returns:
        output [B,T,H,V] and the final state [B,H,K,V], float32.

    Raises:
        RequestError, DeviceError: (ValueErrors) see `check_operands`, `check_head_sizes`; or there is no token, or
            no such precision.
    """
    batch, time, heads, key_size = k.shape
    value_size = v.shape[-1]
    if time < 1:
        raise RequestError("k holds no token; give at least one")
    if input_precision not in get_args(Precision):
        raise RequestError(f"input_precision is {input_precision!r}; give ieee, tf32 or tf32x3")
    check_head_sizes(key_size, value_size)
    if initial_state is None:
        initial_state = torch.zeros(batch, heads, key_size, value_size, device=k.device)
    check_operands(
        {
            "k": (k, (batch, time, heads, key_size)),
            "q": (q, k.shape),
            "v": (v, (batch, time, heads, value_size)),
            "z": (z, k.shape),
            "beta_logits": (beta_logits, (batch, time, heads)),
            "a_log": (a_log, (heads,)),
            "dt_bias": (dt_bias, (heads * key_size,)),
            "initial_state": (initial_state, (batch, heads, key_size, value_size)),
        },
        chunk_local,
    )
    q, k, v, z, beta_logits = in_one_dtype(q, k, v, z, beta_logits)
    (q, q_heads), (k, k_heads), (v, v_heads), (z, z_heads) = (token_rows(x) for x in (q, k, v, z))
    chunks = -(-time // CHUNK)
    space = _workspace(batch * heads * chunks, padded(key_size), k.device)
    o = torch.empty(batch, time, heads, value_size, device=k.device)
    final_state = torch.empty(batch, heads, key_size, value_size, device=k.device)

    chunk_local[(batch * heads * chunks,)](
        q,
        k,
        z,
        packed(beta_logits),
        packed_fp32(a_log),
        packed_fp32(dt_bias),
        *space,
        time,
        heads,
        chunks,
        key_size,
        q_heads,
        k_heads,
        z_heads,
        0.0 if lower_bound is None else lower_bound,
        key_size**-0.5,
        **local_launch(key_size, lower_bound is not None).arguments(),
    )
    walk = walk_launch(key_size, input_precision)
    chunk_walk[(batch * heads, -(-value_size // int(walk.constants["BV"])))](
        *space,
        v,
        packed_fp32(initial_state),
        o,
        final_state,
        time,
        heads,
        chunks,
        key_size,
        value_size,
        v_heads,
        **walk.arguments(),
    )
    return o, final_state


def _workspace(count: int, key_pad: int, device: torch.device) -> tuple[Tensor, ...]:
    """Allocate what `chunk_local` writes and `chunk_walk` reads for `count` = M chunks, float32."""
    keys, pairs = (count, CHUNK, key_pad), (count, CHUNK, CHUNK)
    shapes = (keys, keys, keys, pairs, pairs, (count, key_pad))  # k_in, q_in, k_out, solve, scores, g_sum
    return tuple(torch.empty(shape, device=device) for shape in shapes)
