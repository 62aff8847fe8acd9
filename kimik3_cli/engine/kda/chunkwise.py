"""Kimi Delta Attention, chunk by chunk: the reference for long inputs, float32, finite for any log decay <= 0.

Letters: B batch, T time, H heads, K key channels, V value channels, C chunk, N chunks, M = B*H*N.

Within a chunk with entering state S (Kimi Linear, arXiv 2510.26692, section 3):

    u_i = beta_i (v_i - S^T (e^{G_i} k_i) - sum_{j<i} a_ij u_j)      a_ij = sum_d k_i k_j e^{G_i - G_j}
    o_i = S^T (e^{G_i} q_i) + sum_{j<=i} b_ij u_j                    b_ij = sum_d q_i k_j e^{G_i - G_j}
    S'  = e^{G_C} S + sum_j (e^{G_C - G_j} k_j) u_j^T

Every pair (i, j) is split by exactly one boundary between two neighbouring blocks of 1, 2, 4, ... tokens, where
e^{G_i - G_j} is the decay from the boundary to i times the decay from j to it. Both are products of factors in
(0,1], built up block by block, so nothing overflows and nothing cancels for any g. The same walk over block sizes
inverts I + diag(beta) a by merging the inverses of blocks, which stays exact for correlated keys.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def kda_chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    *,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """Compute what `kda_recurrent` computes, C tokens at a time.

    Args:
        q, k: [B,T,H,K] float32, normalised, q already scaled; T >= 1, any length.
        v: [B,T,H,V].
        g: [B,T,H,K], log decay, at most 0.
        beta: [B,T,H].
        initial_state: [B,H,K,V]; None starts from zero.
        chunk_size: C, a power of two.

    Returns:
        output [B,T,H,V] and the final state [B,H,K,V].
    """
    batch, time, heads, key_dim = k.shape
    value_dim = v.shape[-1]
    q, k, v, g, beta = (_to_chunks(x, chunk_size) for x in (q, k, v, g, beta.unsqueeze(-1)))  # [B*H,N,C,*]
    inside = _within_chunks(q, k, beta * k, g)
    values = inside.inverse @ (beta * v)  # [B*H,N,C,V], the u of a zero S
    reads = inside.inverse @ inside.beta_k_in  # [B*H,N,C,K], what S takes away from them
    k_out = inside.k_out.transpose(-1, -2)  # [B*H,N,K,C]
    if initial_state is None:
        state = v.new_zeros(batch * heads, key_dim, value_dim)
    else:
        state = initial_state.reshape(batch * heads, key_dim, value_dim)
    outputs = []
    for n in range(values.shape[1]):
        u = torch.baddbmm(values[:, n], reads[:, n], state, alpha=-1)  # [B*H,C,V]
        outputs.append(torch.baddbmm(inside.q_in[:, n] @ state, inside.scores[:, n], u))
        state = torch.baddbmm(inside.decay[:, n] * state, k_out[:, n], u)
    output = torch.stack(outputs, dim=1).reshape(batch, heads, -1, value_dim)[:, :, :time]
    return output.transpose(1, 2), state.reshape(batch, heads, key_dim, value_dim)


def _to_chunks(x: Tensor, chunk_size: int) -> Tensor:
    """[B,T,H,X] -> [B*H,N,C,X]; the tail is filled with zeros: beta 0 writes nothing, g 0 forgets nothing."""
    batch, time, heads, width = x.shape
    padding = -time % chunk_size
    return F.pad(x.transpose(1, 2), (0, 0, 0, padding)).reshape(batch * heads, -1, chunk_size, width).contiguous()


class _Inside(NamedTuple):
    """What a chunk does by itself, before its entering state is known."""

    inverse: Tensor  # (I + diag(beta) a)^-1, [B*H,N,C,C]
    scores: Tensor  # b, [B*H,N,C,C]
    q_in: Tensor  # e^{G_i} q_i, [B*H,N,C,K]
    beta_k_in: Tensor  # e^{G_i} beta_i k_i, [B*H,N,C,K]
    k_out: Tensor  # e^{G_C - G_j} k_j, [B*H,N,C,K]
    decay: Tensor  # e^{G_C}, [B*H,N,K,1]


def _within_chunks(q: Tensor, k: Tensor, beta_k: Tensor, g: Tensor) -> _Inside:
    """Walk from blocks of one token to whole chunks, for all chunks at once; every argument is [B*H,N,C,K].

    In a block of s tokens q_in and beta_k_in hold the decay from the block's start, k_out the decay to its end.
    """
    chunk_size, key_dim = k.shape[-2:]
    decay = g.exp()  # over the whole block, [X,1,K]
    q_in, beta_k_in, k_out = q * decay, beta_k * decay, k
    inverse = torch.ones_like(k[..., :1])  # [X,s,s]
    scores = (q * k).sum(-1)
    size = 1
    while size < chunk_size:
        (_, right_q), (_, right_k), (left_k, _) = (_pairs(x, size).unbind(1) for x in (q_in, beta_k_in, k_out))
        left_k = left_k.transpose(-1, -2)  # [X/2,K,s]
        left, right = _pairs(inverse, size, size).unbind(1)
        inverse = _join(left, -(right @ (right_k @ left_k)) @ left, right)
        left, right = _pairs(scores, size, size).unbind(1)
        scores = _join(left, right_q @ left_k, right)
        left, right = decay.view(-1, 2, 1, key_dim).unbind(1)
        into_right = torch.stack([torch.ones_like(left), left], dim=1)  # [X/2,2,1,K]
        out_of_left = torch.stack([right, torch.ones_like(right)], dim=1)
        q_in, beta_k_in = _pairs(q_in, size) * into_right, _pairs(beta_k_in, size) * into_right
        k_out = _pairs(k_out, size) * out_of_left
        decay = left * right
        size *= 2
    square = (*k.shape[:2], chunk_size, chunk_size)
    return _Inside(
        inverse.view(square),
        scores.view(square),
        q_in.view_as(k),
        beta_k_in.view_as(k),
        k_out.view_as(k),
        # of the sum, not the product: a constant g would round the same way at every token and the error would add up
        g.sum(-2).exp().unsqueeze(-1),
    )


def _pairs(x: Tensor, size: int, width: int | None = None) -> Tensor:
    """View blocks of `size` tokens as neighbours, [X/2,2,size,width]."""
    return x.view(-1, 2, size, width or x.shape[-1])


def _join(top_left: Tensor, bottom_left: Tensor, bottom_right: Tensor) -> Tensor:
    """Assemble lower triangular blocks [X,s,s] into [X,2s,2s]."""
    size = top_left.shape[-1]
    top = F.pad(top_left, (0, size))
    return torch.cat([top, torch.cat([bottom_left, bottom_right], dim=-1)], dim=-2)
