"""Kimi Delta Attention, chunk by chunk: the reference for long inputs, float32, finite for any log decay <= 0.

Letters: B batch, T time, H heads, K key channels, V value channels, C chunk, N chunks, M = B*H*N.

Within a chunk with entering state S (Kimi Linear, arXiv 2510.26692, section 3):

    u_i = beta_i (v_i - S^T (e^{G_i} k_i) - sum_{j<i} a_ij u_j)      a_ij = sum_d k_i k_j e^{G_i - G_j}
    o_i = S^T (e^{G_i} q_i) + sum_{j<=i} b_ij u_j                    b_ij = sum_d q_i k_j e^{G_i - G_j}
    S'  = e^{G_C} S + sum_j (e^{G_C - G_j} k_j) u_j^T

Every pair (i, j) is split by exactly one boundary between two neighbouring blocks of 1, 2, 4, ... tokens. There
e^{G_i - G_j} = after_i * until_j: the decay from the boundary to i times the decay from j to the boundary. Both are
products of factors in (0,1], built up block by block, so nothing overflows and nothing cancels for any g. The same walk
over block sizes inverts I + diag(beta) a by merging inverses of blocks, which stays exact for correlated keys.
"""

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
    inverse, scores, decay_in, decay_out = _within_chunks(q, k, g, beta)
    values = inverse @ (beta * v)  # [B*H,N,C,V], the u of a zero S
    reads = inverse @ (beta * decay_in * k)  # [B*H,N,C,K], what S takes away from them
    q_in = decay_in * q  # [B*H,N,C,K]
    k_out = (decay_out * k).transpose(-1, -2)  # [B*H,N,K,C]
    total_decay = decay_in[:, :, -1, :, None]  # [B*H,N,K,1]
    if initial_state is None:
        state = v.new_zeros(batch * heads, key_dim, value_dim)
    else:
        state = initial_state.reshape(batch * heads, key_dim, value_dim)
    outputs = []
    for n in range(values.shape[1]):
        u = torch.baddbmm(values[:, n], reads[:, n], state, alpha=-1)  # [B*H,C,V]
        outputs.append(torch.baddbmm(q_in[:, n] @ state, scores[:, n], u))
        state = torch.baddbmm(total_decay[:, n] * state, k_out[:, n], u)
    output = torch.stack(outputs, dim=1).reshape(batch, heads, -1, value_dim)[:, :, :time]
    return output.transpose(1, 2), state.reshape(batch, heads, key_dim, value_dim)


def _to_chunks(x: Tensor, chunk_size: int) -> Tensor:
    """[B,T,H,X] -> [B*H,N,C,X]; the tail is filled with zeros: beta 0 writes nothing, g 0 forgets nothing."""
    batch, time, heads, width = x.shape
    padding = -time % chunk_size
    return F.pad(x.transpose(1, 2), (0, 0, 0, padding)).reshape(batch * heads, -1, chunk_size, width).contiguous()


def _within_chunks(q: Tensor, k: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute everything that does not need the entering state, for all chunks at once.

    Args:
        q, k, g: [B*H,N,C,K].
        beta: [B*H,N,C,1].

    Returns:
        (I + diag(beta) a)^-1 and b [B*H,N,C,C]; the decay from the chunk's start to i (i included), and from j (j
        excluded) to the chunk's end [B*H,N,C,K].
    """
    rows, chunks, chunk_size, key_dim = k.shape

    def halves(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """[M*C/s,s,X] -> the left and the right block of each pair, [M*C/2s,s,X]."""
        pairs = x.view(-1, 2, size, x.shape[-1])
        return pairs[:, 0], pairs[:, 1]

    beta_k = beta * k
    after = g.exp().view(-1, 1, key_dim)  # decay from the block's start to i, i included
    until = torch.ones_like(after)  # decay after j to the block's end
    inverse = torch.ones_like(beta).view(-1, 1, 1)
    scores = (q * k).sum(-1).view(-1, 1, 1)
    size = 1
    while size < chunk_size:
        left_after, right_after = halves(after, size)
        left_until, right_until = halves(until, size)
        to_boundary = (halves(k, size)[0] * left_until).transpose(-1, -2)  # [M*C/2s,K,s]
        a = (halves(beta_k, size)[1] * right_after) @ to_boundary  # [M*C/2s,s,s]
        b = (halves(q, size)[1] * right_after) @ to_boundary
        left_inverse, right_inverse = halves(inverse, size)
        inverse = _join(left_inverse, -(right_inverse @ a) @ left_inverse, right_inverse)
        left_scores, right_scores = halves(scores, size)
        scores = _join(left_scores, b, right_scores)
        after = torch.cat([left_after, right_after * left_after[:, -1:]], dim=1)  # [M*C/2s,2s,K]
        until = torch.cat([left_until * right_after[:, -1:], right_until], dim=1)
        size *= 2
    square, wide = (rows, chunks, chunk_size, chunk_size), (rows, chunks, chunk_size, key_dim)
    return inverse.view(square), scores.view(square), after.view(wide), until.view(wide)


def _join(top_left: Tensor, bottom_left: Tensor, bottom_right: Tensor) -> Tensor:
    """Assemble lower triangular blocks [X,s,s] into [X,2s,2s]."""
    size = top_left.shape[-1]
    top = F.pad(top_left, (0, size))
    return torch.cat([top, torch.cat([bottom_left, bottom_right], dim=-1)], dim=-2)
