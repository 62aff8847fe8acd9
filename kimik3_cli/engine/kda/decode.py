"""One token of a KDA layer, from raw projections to the gated output: what decoding repeats, in few operations.

Letters: B batch, H heads, K head size (keys and values alike), c convolution kernel.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kimik3_cli.engine.kda.gates import l2_normalise, log_decay
from kimik3_cli.engine.kda.recurrent import kda_step


def kda_decode(
    qkv: Tensor,
    z: Tensor,
    beta: Tensor,
    taps: Tensor,
    a_log: Tensor,
    lower_bound: float | None,
    tail: Tensor,
    memory: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Advance convolutions and delta rule by one token; all float32.

    Args:
        qkv: [B,1,3*H*K], the projections before the convolution.
        z: [B,H,K], dt_bias already added.
        beta: [B,H].
        taps: [c,3*H*K], the convolution's weights, the newest input's last.
        a_log: [H].
        lower_bound: see `log_decay`.
        tail: [B,c-1,3*H*K], the inputs before.
        memory: [B,H,K,K].

    Returns:
        output [B,H,K], the new tail and the new memory.
    """
    window = torch.cat([tail, qkv], dim=1)  # [B,c,3*H*K]
    mixed = F.silu((window * taps).sum(1)).view(len(z), 3, *z.shape[1:])  # [B,3,H,K]
    q, k = l2_normalise(mixed[:, :2]).unbind(1)  # [B,H,K]
    o, memory = kda_step(q * z.shape[-1] ** -0.5, k, mixed[:, 2], log_decay(z, a_log, lower_bound), beta, memory)
    return o, window[:, 1:], memory
