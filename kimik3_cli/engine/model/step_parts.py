"""What the one-token pass shares: every operation costs more than its arithmetic there, so each is made to count.

Letters: B sequences, X and Y any widths.
"""

import math

import torch
from torch import Tensor

from kimik3_cli.engine.model.parts import RMSNorm


class NormStep:
    """RMSNorm as x / hypot(|x|, sqrt(size * eps)) * (sqrt(size) * weight): four operations."""

    def __init__(self, norm: RMSNorm) -> None:
        """Prepare the scaled weight."""
        size = len(norm.weight)
        self.weight = norm.weight * math.sqrt(size)  # [size]
        self.floor = torch.tensor(math.sqrt(size * norm.eps))  # a 0-dim CPU tensor mixes with every device

    def __call__(self, x: Tensor) -> Tensor:
        """[...,size] float32 -> [...,size]."""
        return self.unit(x) * self.weight

    def unit(self, x: Tensor) -> Tensor:
        """The normed x less its factor `weight`."""
        return x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self.floor)


def project(x: Tensor, weight: Tensor) -> Tensor:
    """[B,X] float32 times a weight [X,Y], computed in the weight's dtype -> [B,Y] float32."""
    if weight.dtype is torch.float32:
        return torch.mm(x, weight)
    return torch.mm(x.to(weight.dtype), weight).float()


def project_into(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """Write `project(x, weight)` to out [B,Y] float32."""
    if weight.dtype is torch.float32:
        torch.mm(x, weight, out=out)
    else:
        out.copy_(torch.mm(x.to(weight.dtype), weight))


def project_all(x: Tensor, weights: list[Tensor]) -> Tensor:
    """`project` with each of some weights [X,Y_i], outputs side by side: [B,X] -> [B,sum Y_i] float32."""
    if len(weights) == 1:
        return project(x, weights[0])
    return torch.cat([project(x, weight) for weight in weights], dim=-1)


def accumulate(total: Tensor, x: Tensor, weight: Tensor, factor: float = 1.0) -> Tensor:
    """total [B,Y] + factor * (x [B,X] times weight [X,Y]), the sum in float32."""
    if weight.dtype is torch.float32:
        return torch.addmm(total, x, weight, alpha=factor)
    return torch.add(total, project(x, weight), alpha=factor)
