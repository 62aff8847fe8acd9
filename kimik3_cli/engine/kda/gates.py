"""What turns raw projections into the inputs of the delta rule: decay gate and key normalisation, float32.

Letters: B batch, T time, H heads, K key channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kimik3_cli.engine.native import operations as compiled

L2_FLOOR = 1e-3
_L2_FLOOR = torch.tensor(L2_FLOOR, device="cpu")  # a 0-dim CPU tensor mixes with every device


def decay_rate(a_log: Tensor, lower_bound: float | None) -> Tensor:
    """A_log [H] -> the factor of `log_decay`, [H,1] float32: e^{A_log}, negative for the gate without a bound."""
    rate = a_log.float().exp().unsqueeze(-1)
    return -rate if lower_bound is None else rate


def biased_log_decay(z: Tensor, bias: Tensor, rate: Tensor, lower_bound: float | None) -> Tensor:
    """`log_decay` of z [B,T,H,K] of any dtype plus bias [H*K]."""
    z = z.float()
    if not compiled.runs_compiled(z, bias, rate):
        return log_decay(z + bias.view(z.shape[-2:]), rate, lower_bound)
    out = torch.empty(z.shape)
    compiled.log_decay(z.contiguous().flatten(0, 1), bias, rate, lower_bound, out.flatten(0, 1))
    return out


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


def l2_normalise(x: Tensor, scale: float = 1.0) -> Tensor:
    """[..., K] of any dtype -> x * rsqrt(sum x^2 + 1e-6) * scale, float32."""
    x = x.float()
    if compiled.runs_compiled(x):
        out = torch.empty(x.shape)
        compiled.rms_norm(compiled.by_rows(x), None, scale, L2_FLOOR, compiled.by_rows(out))
        return out
    return x / (torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), _L2_FLOOR) / scale)
