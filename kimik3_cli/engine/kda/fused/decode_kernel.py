"""The one kernel of the fused decode: a token of a KDA layer between its projections.

Letters: B batch, H heads, K head size (keys and values alike), c convolution kernel; KP is K filled up to a power of
two, BV a block of value channels, R rows of the convolution's history that are handled at once.
"""

import triton
import triton.language as tl

from kimik3_cli.engine.kda.fused.device_functions import decay_state, gate_rate, l2_normalise, log_decay


@triton.jit(do_not_specialize=["H", "c"])
def decode_token(
    qkv,  # [B,3*H*K], before the convolution
    z,  # [B*H,K], dt_bias already added
    beta_logits,  # [B*H]
    gate,  # [B*H,K], before the sigmoid
    taps,  # [c,3*H*K], the newest input's last
    a_log,  # [H]
    out_weight,  # [K]
    tail,  # in and out, [B,c-1,3*H*K]
    memory,  # in and out, [B*H,K,K]
    y,  # out, [B*H,K]
    H,
    K,
    c,
    lower_bound,
    out_floor,
    BOUNDED: tl.constexpr,
    KP: tl.constexpr,
    BV: tl.constexpr,
    R: tl.constexpr,
):
    """Advance one head of one sequence.

        S~ = Diag(e^g) S;    S' = S~ + beta k (v - S~^T k)^T;    o = S'^T q
        y  = o / sqrt(|o|^2 + out_floor^2) * out_weight * sigmoid(gate)

    Value channels meet only in |o|^2, so the state passes through in blocks of BV of them; o waits in y for its norm.
    """
    sequence = tl.program_id(0).to(tl.int64)
    head = sequence % H
    batch = sequence // H
    width = H * K  # channels of one of the three convolutions
    qkv += batch * 3 * width
    tail += batch * (c - 1) * 3 * width
    channel = tl.arange(0, KP)
    key = channel < K

    q = l2_normalise(_convolve(qkv, tail, taps, head * K + channel, key, 3 * width, c, R, KP))
    k = l2_normalise(_convolve(qkv, tail, taps, width + head * K + channel, key, 3 * width, c, R, KP))
    z_k = tl.load(z + sequence * K + channel, mask=key, other=0.0).to(tl.float32)
    g = log_decay(z_k, gate_rate(tl.load(a_log + head)), lower_bound, BOUNDED)
    beta = tl.sigmoid(tl.load(beta_logits + sequence).to(tl.float32))
    squares = 0.0
    for block in range(KP // BV):
        value = block * BV + tl.arange(0, BV)
        wanted = value < K
        v = _convolve(qkv, tail, taps, 2 * width + head * K + value, wanted, 3 * width, c, R, BV)
        place = memory + (sequence * K + channel[:, None]) * K + value[None, :]
        in_state = key[:, None] & wanted[None, :]
        state = decay_state(tl.load(place, mask=in_state, other=0.0), g[:, None])  # [KP,BV]
        error = beta * (v - tl.sum(state * k[:, None], axis=0))
        state += k[:, None] * error[None, :]
        tl.store(place, state, mask=in_state)
        o = tl.sum(state * q[:, None], axis=0)  # [BV]
        squares += tl.sum(o * o, axis=0)
        tl.store(y + sequence * K + value, o, mask=wanted)

    tl.debug_barrier()  # all of y is written, and nobody reads the tail for a convolution any more
    o = tl.load(y + sequence * K + channel, mask=key, other=0.0)
    weight = tl.load(out_weight + channel, mask=key, other=0.0)
    opened = tl.sigmoid(tl.load(gate + sequence * K + channel, mask=key, other=0.0).to(tl.float32))
    tl.store(y + sequence * K + channel, o * tl.rsqrt(squares + out_floor * out_floor) * weight * opened, mask=key)
    _shift(qkv, tail, head, K, width, c, R, KP)


@triton.jit
def _convolve(qkv, tail, taps, column, wanted, row_width, c, R: tl.constexpr, X: tl.constexpr):
    """SiLU of the convolution of X columns [X] at the newest token."""
    newest = tl.load(qkv + column, mask=wanted, other=0.0).to(tl.float32)
    total = newest * tl.load(taps + (c - 1) * row_width + column, mask=wanted, other=0.0)
    for first in range(0, c - 1, R):
        row = first + tl.arange(0, R)
        place = row[:, None] * row_width + column[None, :]
        inside = (row[:, None] < c - 1) & wanted[None, :]
        history = tl.load(tail + place, mask=inside, other=0.0)  # [R,X]
        total += tl.sum(history * tl.load(taps + place, mask=inside, other=0.0), axis=0)
    return total * tl.sigmoid(total)


@triton.jit
def _shift(qkv, tail, head, K, width, c, R: tl.constexpr, KP: tl.constexpr):
    """Move the histories of this head's q, k and v by one token; each barrier lets a row be read before it is lost."""
    lane = tl.arange(0, 4 * KP)  # three of the four quarters
    part = lane // KP
    channel = lane % KP
    wanted = (part < 3) & (channel < K)
    column = part * width + head * K + channel
    for first in range(1, c, R):
        row = first + tl.arange(0, R)
        place = row[:, None] * (3 * width) + column[None, :]
        older = tl.load(tail + place, mask=(row[:, None] < c - 1) & wanted[None, :], other=0.0)
        tl.debug_barrier()
        tl.store(tail + place - 3 * width, older, mask=(row[:, None] < c - 1) & wanted[None, :])
    newest = tl.load(qkv + column, mask=wanted & (c > 1), other=0.0).to(tl.float32)
    tl.store(tail + (c - 2) * 3 * width + column, newest, mask=wanted & (c > 1))
