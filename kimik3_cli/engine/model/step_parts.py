"""What the one-token pass shares: every operation costs more than its arithmetic there, so each is made to count.

Results go to buffers that are made once, so that no token waits for memory or for views of it. Where the compiled
operations are there, they replace the small ones.

Letters: B sequences, N rows, I inner width, X and Y any widths.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from kimik3_cli.engine.model.layout import joined
from kimik3_cli.engine.model.parts import Activation, RMSNorm
from kimik3_cli.engine.native.library import computes, has_threads
from kimik3_cli.engine.native.operations import Products, gated, mixed_norm, rms_norm


class NormStep:
    """RMSNorm as x / hypot(|x|, sqrt(X * eps)) * (sqrt(X) * weight), into one buffer."""

    def __init__(self, norm: RMSNorm, batch: int, out: Tensor | None = None) -> None:
        """Prepare the scaled weight; `out` [B,X] takes the place of a buffer of its own."""
        size = len(norm.weight)
        self.weight = norm.weight * math.sqrt(size)  # [X]
        self.floor = math.sqrt(size * norm.eps)
        self.floor_tensor = torch.tensor(self.floor, device="cpu")  # a 0-dim CPU tensor mixes with every device
        self.out = new_buffer(norm.weight, batch, size) if out is None else out
        self.compiled = computes(self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        """[B,X] float32 -> [B,X], valid until the next call; x may be the buffer itself."""
        if self.compiled:
            rms_norm(x, self.weight, 1.0, self.floor, self.out)
            return self.out
        return torch.mul(self.unit(x), self.weight, out=self.out)

    def unit(self, x: Tensor) -> Tensor:
        """The normed x [...,X] less its factor `weight`."""
        return x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self.floor_tensor)


class MixedNormStep:
    """RMSNorm of what `mix_residuals` computes."""

    def __init__(self, mix_norm: RMSNorm, mix_proj: nn.Linear, norm: RMSNorm, batch: int) -> None:
        """Prepare the query."""
        self.mix_norm, self.norm = NormStep(mix_norm, batch), NormStep(norm, batch)
        self.query = self.mix_norm.weight * mix_proj.weight[0].float()  # [X]

    def __call__(self, h: Tensor, blocks: list[Tensor]) -> Tensor:
        """Mix h [B,X] with the finished blocks, each [B,X], and norm the sum."""
        norm = self.norm
        if norm.compiled:
            mixed_norm([*blocks, h], self.query, self.mix_norm.floor, norm.weight, 1.0, norm.floor, norm.out)
            return norm.out
        if not blocks:
            return norm(h)
        values = torch.stack([*blocks, h], dim=1)  # [B,n,X] of n sources
        weights = torch.softmax(self.mix_norm.unit(values) @ self.query, dim=-1)  # [B,n]
        return norm(torch.bmm(weights.unsqueeze(1), values).squeeze(1))


class GatedStep:
    """The gated activation of N rows: gate and up, side by side in `both` [N,2*I], to `out` [N,I]."""

    def __init__(self, activation: Activation, rows: int, width: int, like: Tensor) -> None:
        """Make the buffers, where the weight `like` is."""
        self.both, self.out = new_buffer(like, rows, 2 * width), new_buffer(like, rows, width)
        self.gate, self.up = torch.split(self.both, width, dim=-1)
        self.activation, self.compiled = activation, computes(like)

    def __call__(self) -> Tensor:
        """Compute and return `out`, valid until the next call."""
        if self.compiled:
            gated(self.gate, self.up, self.activation.caps, self.out)
        else:
            self.out.copy_(self.activation.formula(self.gate, self.up))
        return self.out


class Projections:
    """Products of one input with some weights [Y_i,X], side by side in the buffer `out` [B,sum Y_i] float32."""

    def __init__(self, weights: Sequence[Tensor], batch: int, out: Tensor | None = None) -> None:
        """Make the buffer, unless it is given."""
        self.out = new_buffer(weights[0], batch, sum(len(weight) for weight in weights)) if out is None else out
        self.compiled = None
        if batch == 1 and can_multiply(weights):
            self.compiled = Products(weights, self.out)
        else:
            self.weights = joined(weights)  # [X,Y_i]
            self.parts = torch.split(self.out, [weight.shape[1] for weight in self.weights], dim=-1)

    def __call__(self, x: Tensor, total: Tensor | None = None) -> Tensor:
        """x [B,X] float32 -> `out`, valid until the next call; `total` [B,Y] or [Y], for one weight only, is added."""
        if self.compiled:
            self.compiled(x, total)
        elif total is None:
            for weight, part in zip(self.weights, self.parts, strict=True):
                project_into(part, x, weight)
        else:
            (weight,) = self.weights
            accumulate(total, x, weight, out=self.out)
        return self.out


def can_multiply(weights: Iterable[Tensor]) -> bool:
    """Say whether the compiled operations take these weights."""
    return has_threads() and all(computes(weight) and weight.is_contiguous() for weight in weights)


def new_buffer(like: Tensor, *shape: int) -> Tensor:
    """Return float32 memory where the weight `like` is."""
    return torch.empty(*shape, device=like.device)


def project_into(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """[B,X] float32 times a weight [X,Y], computed in the weight's dtype, to out [B,Y] float32."""
    if weight.dtype is torch.float32:
        torch.mm(x, weight, out=out)
    else:
        out.copy_(torch.mm(x.to(weight.dtype), weight))


def accumulate(total: Tensor, x: Tensor, weight: Tensor, factor: float = 1.0, out: Tensor | None = None) -> Tensor:
    """total [B,Y] + factor * (x [B,X] times weight [X,Y]), the sum in float32, to `out` or new memory."""
    if weight.dtype is torch.float32:
        return torch.addmm(total, x, weight, alpha=factor, out=out)
    return torch.add(total, torch.mm(x.to(weight.dtype), weight), alpha=factor, out=out)
