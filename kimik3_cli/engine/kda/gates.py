"""What turns raw projections into the inputs of the delta rule: decay gate and key normalisation, float32.

Letters: B batch, T time, H heads, K key channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_L2_FLOOR = torch.tensor(1e-3, device="cpu")  # a 0-dim CPU tensor mixes with every device


def log_decay(z: Tensor, a_log: Tensor, lower_bound: float | None) -> Tensor:
    """Return g <= 0 in float32.

    lower_bound * sigmoid(e^{A_log} z) when it is set (Kimi K3, arXiv 2607.24653), else -e^{A_log} softplus(z)
    (Kimi Linear, arXiv 2510.26692).

    Args:
        z: [B,T,H,K], dt_bias already added.
        a_log: [H].
    """
    rate = a_log.float().exp().unsqueeze(-1)  # [H,1]
    if lower_bound is None:
        return -rate * F.softplus(z.float())
    return lower_bound * torch.sigmoid(rate * z.float())


def l2_normalise(x: Tensor) -> Tensor:
    """[..., K] of any dtype -> x * rsqrt(sum x^2 + 1e-6), float32."""
    x = x.float()
    return x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), _L2_FLOOR)
