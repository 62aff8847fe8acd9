"""Pieces that several layers share: norm, float32 projection, activations, depth mixing.

Letters: B batch, T time, D hidden size, N sources of a residual mix.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kimik3_cli.engine.config import KimiK3Config

Activation = Callable[[Tensor, Tensor], Tensor]


class Packable(nn.Module):
    """A module that can prepare for inference by combining weights once, see `KimiK3.pack`.

    What it prepares is used only while gradients are off, so that training never meets it.
    """

    def pack(self) -> None:
        """Prepare; every parameter keeps its name and value."""
        raise TypeError(f"{type(self).__name__} says that it can be packed, but not how")

    def unpack(self) -> None:
        """Forget what was prepared, before parameters are moved or replaced."""
        raise TypeError(f"{type(self).__name__} says that it can be packed, but not how")


class RMSNorm(Packable):
    """x * rsqrt(mean(x^2) + eps) * weight over the last axis, in float32.

    Computed as x / hypot(|x|, sqrt(size * eps)) * (sqrt(size) * weight), the fewest operations: decoding repeats it.
    """

    def __init__(self, size: int, eps: float) -> None:
        """Create a norm of `size` channels with weight 1."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.root_size = math.sqrt(size)
        self.floor = torch.tensor(math.sqrt(size * eps), device="cpu")  # a 0-dim CPU tensor mixes with every device
        self.packed: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] of any dtype -> [..., size] float32."""
        return self.unit(x.float()) * self.scaled_weight()

    def unit(self, x: Tensor) -> Tensor:
        """[..., size] float32 -> the normed x less its factor `scaled_weight`."""
        return x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self.floor)

    def scaled_weight(self) -> Tensor:
        """sqrt(size) * weight, [size]."""
        if self.packed is None or torch.is_grad_enabled():
            return self.weight * self.root_size
        return self.packed

    def pack(self) -> None:
        """Keep the scaled weight."""
        self.packed = self.weight.detach() * self.root_size

    def unpack(self) -> None:
        """Forget it."""
        self.packed = None


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a projection without bias, as everywhere in this architecture."""
    return nn.Linear(inputs, outputs, bias=False)


class JointProjection:
    """Several projections of one input. Packed, they are one matrix product; their weights become views of its matrix.

    Not a module: the projections stay registered where they are, under the checkpoint's names.
    """

    def __init__(self, *projections: nn.Linear) -> None:
        """Join projections that are applied to the same input."""
        self.projections = projections
        self.packed: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., sum of out], in the order of the projections."""
        if self.packed is None or torch.is_grad_enabled():
            return torch.cat([projection(x) for projection in self.projections], dim=-1)
        return F.linear(x, self.packed)

    def pack(self) -> None:
        """Copy the weights into one matrix and let each projection's weight be its rows of it."""
        packed = torch.cat([projection.weight.detach() for projection in self.projections])  # [sum of out,in]
        rows = torch.split(packed, [projection.out_features for projection in self.projections])
        for projection, weight in zip(self.projections, rows, strict=True):
            projection.weight = nn.Parameter(weight, requires_grad=projection.weight.requires_grad)
        self.packed = packed

    def unpack(self) -> None:
        """Forget the joint matrix, before weights are moved or replaced."""
        self.packed = None


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which float32 products stay float32, even inside a bf16 autocast."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """Project in float32 always: for the router and beta, whose rounding would show.

    Args:
        x: [..., in]; weight: [out, in].
    """
    with without_autocast(x.device):
        return F.linear(x.float(), weight.float())


def make_activation(config: KimiK3Config) -> Activation:
    """Return the gated activation act(gate, up) of the configuration, computed in float32."""
    return (
        SituGlu(config.activation_situ_beta, config.activation_situ_linear_beta)
        if config.hidden_act == "situ"
        else silu_glu
    )


def silu_glu(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) * up."""
    return F.silu(gate.float()) * up.float()


class SituGlu:
    """SiTU (Kimi K3, arXiv 2607.24653): b tanh(gate/b) sigmoid(gate) * l tanh(up/l).

    The sigmoid takes the uncapped gate; b null counts as 1; l null leaves `up` as it is.
    """

    def __init__(self, beta: float | None, linear_beta: float | None) -> None:
        """Keep the two caps."""
        self.beta = 1.0 if beta is None else beta
        self.linear_beta = linear_beta

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """[..., I] and [..., I] of any dtype -> [..., I] float32."""
        gate, up = gate.float(), up.float()
        if self.linear_beta is not None:
            up = self.linear_beta * torch.tanh(up / self.linear_beta)
        return self.beta * torch.tanh(gate / self.beta) * torch.sigmoid(gate) * up


def mix_residuals(h: Tensor, blocks: list[Tensor], norm: RMSNorm, proj: nn.Linear) -> Tensor:
    """Attend over depth: softmax over sources n of the normalised key times the pseudo-query; values are raw.

    Attention residuals (Kimi K3, arXiv 2607.24653); float32.

    Args:
        h: [B,T,D], the running sum of the current block.
        blocks: finished blocks, each [B,T,D]; none means that h itself is returned.
        norm, proj: give the key's weight [D] and the pseudo-query [1,D].
    """
    if not blocks:
        return h
    values = torch.stack([*blocks, h], dim=-2).float()  # [B,T,N,D]
    query = norm.scaled_weight() * proj.weight[0]  # [D]
    with without_autocast(h.device):
        scores = norm.unit(values) @ query  # [B,T,N]
        return (torch.softmax(scores, dim=-1).unsqueeze(-2) @ values).squeeze(-2)
