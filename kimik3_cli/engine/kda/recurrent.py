"""Kimi Delta Attention, token by token: the oracle of every other path, in any floating dtype.

Letters: B batch, T time, H heads, K key channels, V value channels.
"""

import torch
from torch import Tensor


def kda_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Advance the recurrence by one token (Kimi Linear, arXiv 2510.26692, eq. 1).

    S_t = Diag(exp g_t) S_{t-1} + beta_t k_t (v_t - S~^T k_t)^T with S~ the decayed state; o_t = S_t^T q_t.

    Args:
        q, k: [B,H,K], normalised, q already scaled.
        v: [B,H,V].
        g: [B,H,K], log decay, at most 0.
        beta: [B,H], write strength in [0,1].
        state: [B,H,K,V].

    Returns:
        output [B,H,V] and the new state [B,H,K,V].
    """
    decayed = state * g.exp().unsqueeze(-1)  # [B,H,K,V]
    predicted = torch.matmul(k.unsqueeze(-2), decayed)  # [B,H,1,V]
    error = beta[..., None, None] * (v.unsqueeze(-2) - predicted)  # [B,H,1,V]
    state = torch.addcmul(decayed, k.unsqueeze(-1), error)
    return torch.matmul(q.unsqueeze(-2), state).squeeze(-2), state


def kda_recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over T >= 1 tokens.

    Args:
        q, k: [B,T,H,K], normalised, q already scaled.
        v: [B,T,H,V].
        g: [B,T,H,K], log decay, at most 0.
        beta: [B,T,H].
        initial_state: [B,H,K,V]; None starts from zero.

    Returns:
        output [B,T,H,V] and the final state [B,H,K,V], in the dtype of v.
    """
    batch, _, heads, key_dim = k.shape
    state = v.new_zeros(batch, heads, key_dim, v.shape[-1]) if initial_state is None else initial_state
    outputs = []
    for q_t, k_t, v_t, g_t, beta_t in zip(*(x.unbind(1) for x in (q, k, v, g, beta)), strict=True):
        output, state = kda_step(q_t, k_t, v_t, g_t, beta_t, state)
        outputs.append(output)
    return torch.stack(outputs, dim=1), state
