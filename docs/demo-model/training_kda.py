"""Kimi Delta Attention for training: the engine's chunkwise form, rearranged to be cheap to differentiate on a CPU.

The engine must stay exact for any gate, at any chunk size. Training can assume more: gates bounded by -5 and chunks of
C = 32 tokens. Then every pairwise decay e^{G_i - G_j} may be split at one point in the middle of the chunk, since both
exponents stay within 16 * 5 = 80 and float32 holds e^88. Letters as in the engine: B batch, T time, H heads, K key
channels, V value channels, N chunks.
"""

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 32


def kda_for_training(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    *,
    chunk_size: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Stand in for the engine's kda_chunkwise where g is in [-5, 0]; the configured chunk size is not used.

    Args: q, k, g [B,T,H,K]; v [B,T,H,V]; beta [B,T,H]; state [B,H,K,V]. Returns: output [B,T,H,V], final state.
    """
    batch, time, heads, key_dim = k.shape
    value_dim = v.shape[-1]
    solved, scores, q_in, k_out, total_decay = within_chunks(*(to_chunks(x) for x in (q, k, v, g, beta.unsqueeze(-1))))
    values, reads = solved.split([value_dim, key_dim], dim=-1)
    state = v.new_zeros(batch, heads, key_dim, value_dim) if initial_state is None else initial_state
    state = state.flatten(0, 1)  # [B*H,K,V]
    outputs = []
    for value, read, score, query, key, decay in zip(
        *(x.unbind(1) for x in (values, reads, scores, q_in, k_out, total_decay)), strict=True
    ):
        u = torch.baddbmm(value, read, state, alpha=-1)
        outputs.append(torch.baddbmm(query @ state, score, u))
        state = torch.baddbmm(decay * state, key, u)
    output = torch.stack(outputs, dim=1).reshape(batch, heads, -1, value_dim)[:, :, :time]
    return output.transpose(1, 2), state.view(batch, heads, key_dim, value_dim)


def to_chunks(x: Tensor) -> Tensor:
    """[B,T,H,X] -> [B*H,N,C,X], the tail filled with zeros."""
    batch, time, heads, width = x.shape
    padded = functional.pad(x.transpose(1, 2), (0, 0, 0, -time % CHUNK))
    return padded.reshape(batch * heads, -1, CHUNK, width)


def within_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """All that does not depend on the state that enters a chunk; inputs [B*H,N,C,*].

    Returns [u for a zero state | what the state takes away from it] [.,N,C,V+K], scores [.,N,C,C], queries that read
    the state [.,N,C,K], keys that write it [.,N,K,C] and the chunk's whole decay [.,N,K,1].
    """
    decay = g.cumsum(2)  # from the chunk's start to i
    from_middle = decay - decay[:, :, CHUNK // 2 - 1 : CHUNK // 2]
    later, earlier = from_middle.exp(), (-from_middle).exp()
    k_earlier = (k * earlier).mT
    a = torch.tril(beta * ((k * later) @ k_earlier), -1)
    scores = torch.tril((q * later) @ k_earlier)
    decay_in = decay.exp()
    right = torch.cat([beta * v, beta * decay_in * k], dim=-1)
    solved = torch.linalg.solve_triangular(a, right, upper=False, unitriangular=True)
    total = decay[:, :, -1:]
    return solved, scores, q * decay_in, ((total - decay).exp() * k).mT, total.exp().mT
