"""What turns raw projections into the inputs of the delta rule: decay gate and key normalisation, float32.

Letters: B batch, T time, H heads, K key channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_L2_FLOOR = torch.tensor(1e-3, device="cpu")  # a 0-dim CPU tensor mixes with every device


def decay_rate(a_log: Tensor, lower_bound: float | None) -> Tensor:
    """A_log [H] -> the factor of `log_decay`, [H,1] float32: e^{A_log}, negative for the gate without a bound."""
    rate = a_log.float().exp().unsqueeze(-1)
    return -rate if lower_bound is None else rate


def log_decay(z: Tensor, rate: Tensor, lower_bound: float | None) -> Tensor:
    """Return g <= 0 in float32.

    lower_bound * sigmoid(e^{A_log} z) when it is set (Kimi K3, arXiv 2607.24653), else -e^{A_log} softplus(z)
    (Kimi Linear, arXiv 2510.26692).

    Args:
        z: [...,H,K], dt_bias already added.
        rate: [H,1], see `decay_rate`.
    """
    if lower_bound is None:
        return F.softplus(z.float()) * rate
    return torch.sigmoid(z.float() * rate) * lower_bound


def l2_normalise(x: Tensor) -> Tensor:
    """[..., K] of any dtype -> x * rsqrt(sum x^2 + 1e-6), float32."""
    x = x.float()
    return x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), _L2_FLOOR)
