"""Kimi Delta Attention, chunk by chunk: the reference for long inputs, float32, finite for any log decay <= 0.

Letters: B batch, T time, H heads, K key channels, V value channels, C chunk, N chunks, P blocks of s tokens.

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
    q, k, v, g, beta = (_to_chunks(x, chunk_size) for x in (q, k, v, g, beta.unsqueeze(-1)))  # [N,B*H,C,*]
    inside = _within_chunks(q, k, beta * k, g)
    values = inside.inverse @ (beta * v)  # [N,B*H,C,V], the u of a zero S
    reads = inside.inverse @ inside.beta_k_in  # [N,B*H,C,K], what S takes away from them
    k_out = inside.k_out.transpose(-1, -2)  # [N,B*H,K,C]
    if initial_state is None:
        state = v.new_zeros(batch * heads, key_dim, value_dim)
    else:
        state = initial_state.reshape(batch * heads, key_dim, value_dim)
    outputs = []
    for n in range(len(values)):
        u = torch.baddbmm(values[n], reads[n], state, alpha=-1)  # [B*H,C,V]
        outputs.append(torch.baddbmm(inside.q_in[n] @ state, inside.scores[n], u))
        state = torch.baddbmm(inside.decay[n] * state, k_out[n], u)
    by_chunk = torch.stack(outputs).view(-1, batch, heads, chunk_size, value_dim)  # [N,B,H,C,V]
    output = by_chunk.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :time]
    return output, state.view(batch, heads, key_dim, value_dim)


def _to_chunks(x: Tensor, chunk_size: int) -> Tensor:
    """[B,T,H,X] -> [N,B*H,C,X]; the tail is filled with zeros: beta 0 writes nothing, g 0 forgets nothing."""
    padded = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % chunk_size))
    return torch.unflatten(padded, 1, (-1, chunk_size)).permute(1, 0, 3, 2, 4).flatten(1, 2).contiguous()


class _Inside(NamedTuple):
    """What a chunk does by itself, before its entering state is known."""

    inverse: Tensor  # (I + diag(beta) a)^-1, [N,B*H,C,C]
    scores: Tensor  # b, [N,B*H,C,C]
    q_in: Tensor  # e^{G_i} q_i, [N,B*H,C,K]
    beta_k_in: Tensor  # e^{G_i} beta_i k_i, [N,B*H,C,K]
    k_out: Tensor  # e^{G_C - G_j} k_j, [N,B*H,C,K]
    decay: Tensor  # e^{G_C}, [N,B*H,K,1]


def _within_chunks(q: Tensor, k: Tensor, beta_k: Tensor, g: Tensor) -> _Inside:
    """Walk from blocks of one token to whole chunks, for all chunks at once; every argument is [N,B*H,C,K].

    In a block of s tokens q_in and beta_k_in hold the decay from the block's start, k_out the decay to its end.
    """
    chunk_size, key_dim = k.shape[-2:]
    decay = g.exp()  # over the whole block, [P,1,K]
    q_in, beta_k_in, k_out = q * decay, beta_k * decay, k
    inverse = torch.ones_like(k[..., :1])  # [P,s,s]
    scores = k.new_zeros(*k.shape[:2], chunk_size, chunk_size)
    scores.diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
    size = 1
    while size < chunk_size:
        (_, right_q), (_, right_k), (left_k, _) = (_pairs(x, size).unbind(1) for x in (q_in, beta_k_in, k_out))
        left_k = left_k.transpose(-1, -2)  # [P/2,K,s]
        below = _below_diagonal(scores, size)
        below.copy_((right_q @ left_k).view_as(below))
        left, right = _pairs(inverse, size, size).unbind(1)
        inverse = _join(left, -(right @ (right_k @ left_k)) @ left, right)
        left, right = decay.view(-1, 2, 1, key_dim).unbind(1)
        into_right = torch.stack([torch.ones_like(left), left], dim=1)  # [P/2,2,1,K]
        out_of_left = torch.stack([right, torch.ones_like(right)], dim=1)
        q_in, beta_k_in = _pairs(q_in, size) * into_right, _pairs(beta_k_in, size) * into_right
        k_out = _pairs(k_out, size) * out_of_left
        decay = left * right
        size *= 2
    return _Inside(
        inverse.view_as(scores),
        scores,
        q_in.view_as(k),
        beta_k_in.view_as(k),
        k_out.view_as(k),
        # of the sum, not the product: a constant g would round the same way at every token and the error would add up
        g.sum(-2).exp().unsqueeze(-1),
    )


def _pairs(x: Tensor, size: int, width: int | None = None) -> Tensor:
    """View blocks of `size` tokens as neighbours, [P/2,2,size,width]."""
    return x.view(-1, 2, size, width or x.shape[-1])


def _join(top_left: Tensor, bottom_left: Tensor, bottom_right: Tensor) -> Tensor:
    """Assemble lower triangular blocks [P,s,s] into [P,2s,2s]."""
    size = top_left.shape[-1]
    joined = top_left.new_zeros(len(top_left), 2 * size, 2 * size)
    joined[:, :size, :size], joined[:, size:, :size], joined[:, size:, size:] = top_left, bottom_left, bottom_right
    return joined


def _below_diagonal(x: Tensor, size: int) -> Tensor:
    """View the block below each pair of neighbours on the diagonal of [N,B*H,C,C]: [N*B*H,C/2s,s,s]."""
    chunk_size = x.shape[-1]
    shape = (x.shape[0] * x.shape[1], chunk_size // (2 * size), size, size)
    return x.as_strided(shape, (chunk_size**2, 2 * size * (chunk_size + 1), chunk_size, 1), size * chunk_size)
