"""One token of a KDA layer between its projections: what decoding repeats, in few operations and in place.

Letters: B batch, H heads, K head size (keys and values alike), c convolution kernel.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from kimik3_cli.engine.kda.gates import decay_rate, l2_normalise, log_decay
from kimik3_cli.engine.native.operations import kda_token


@dataclass(frozen=True)
class KdaConstants:
    """What a layer applies to every token; all float32."""

    taps: Tensor  # [c,3*H*K], the newest input's last
    a_log: Tensor  # [H]
    lower_bound: float | None  # see `log_decay`
    out_weight: Tensor  # [K], sqrt(K) * the weight of the output's RMSNorm
    out_floor: float  # K * sqrt(eps) of that norm

    @cached_property
    def rate(self) -> Tensor:
        """`decay_rate` of the layer, [H,1]."""
        return decay_rate(self.a_log, self.lower_bound)

    @cached_property
    def floor(self) -> Tensor:
        """`out_floor` as a 0-dim CPU tensor, which mixes with every device."""
        return torch.tensor(self.out_floor, device="cpu")


def kda_decode_native(
    qkv: Tensor, z: Tensor, beta: Tensor, gate: Tensor, constants: KdaConstants, tail: Tensor, memory: Tensor
) -> Tensor:
    """`kda_decode` in one compiled pass, float32 on the CPU; z, contiguous, becomes the result."""
    kda_token(
        qkv,
        z,
        beta,
        gate,
        constants.taps,
        constants.rate,
        constants.lower_bound,
        constants.out_weight,
        constants.out_floor,
        tail,
        memory,
    )
    return z


def kda_decode(
    qkv: Tensor, z: Tensor, beta: Tensor, gate: Tensor, constants: KdaConstants, tail: Tensor, memory: Tensor
) -> Tensor:
    """Convolutions, gates, delta rule and gated norm of one token; `tail` and `memory` are advanced in place.

    The recurrence is that of `kda_step`.

    Args:
        qkv: [B,3*H*K], the projections before the convolution.
        z: [B,H,K], dt_bias already added.
        beta: [B,H], before the sigmoid.
        gate: [B,H,K], before the sigmoid.
        tail: [B,c-1,3*H*K], the inputs before.
        memory: [B,H,K,K].

    Returns:
        [B,H,K].
    """
    batch, heads, size = z.shape
    window = torch.cat([tail, qkv.unsqueeze(1)], dim=1)  # [B,c,3*H*K]
    tail.copy_(window[:, 1:])
    mixed = F.silu((window * constants.taps).sum(1)).view(batch, 3, heads, size)
    q, k = l2_normalise(mixed[:, :2]).unbind(1)  # [B,H,K]
    decay = log_decay(z, constants.rate, constants.lower_bound).exp_()
    state = memory.view(batch * heads, size, size).mul_(decay.view(-1, size, 1))
    key = k.reshape(-1, 1, size)  # [B*H,1,K]
    error = torch.baddbmm(mixed[:, 2].reshape(-1, 1, size), key, state, alpha=-1)  # [B*H,1,K]
    error *= torch.sigmoid(beta).view(-1, 1, 1)
    state.baddbmm_(key.transpose(1, 2), error)
    o = torch.bmm(q.reshape(-1, 1, size), state).view(batch, heads, size)
    # RMSNorm of o K^-0.5: the factor only acts through eps
    unit = o / torch.hypot(torch.linalg.vector_norm(o, dim=-1, keepdim=True), constants.floor)
    return unit * constants.out_weight * torch.sigmoid(gate)
