"""Pieces that several layers share: norm, float32 projection, activations, depth mixing.

Letters: B batch, T time, D hidden size, N sources of a residual mix.
"""

import math
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kimik3_cli.engine.config import KimiK3Config
from kimik3_cli.engine.native.operations import Caps, by_rows, gated, mixed_norm, rms_norm, runs_compiled


class RMSNorm(nn.Module):
    """x * rsqrt(mean(x^2) + eps) * weight over the last axis, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        """Create a norm of `size` channels with weight 1."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] of any dtype -> [..., size] float32."""
        x = x.float()
        if not runs_compiled(self.weight, x):
            return x * per_rms(x, self.eps) * self.weight
        out = torch.empty(x.shape)
        rms_norm(by_rows(x), self.weight, *self.scale_and_floor(), by_rows(out))
        return out

    def scale_and_floor(self) -> tuple[float, float]:
        """The norm as x / hypot(|x|, floor) * scale * weight."""
        size = len(self.weight)
        return math.sqrt(size), math.sqrt(size * self.eps)


def per_rms(x: Tensor, eps: float) -> Tensor:
    """rsqrt(mean(x^2) + eps) over the last axis, [..., X] float32 -> [..., 1]."""
    return torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1] + eps)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a projection without bias, as everywhere in this architecture."""
    return nn.Linear(inputs, outputs, bias=False)


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


class Activation(ABC):
    """A gated activation; `caps` describes it to the compiled operations."""

    caps = Caps()

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """[...,I] and [...,I] of any dtype -> [...,I] float32."""
        gate, up = gate.float(), up.float()
        if not runs_compiled(gate, up):
            return self.formula(gate, up)
        out = torch.empty(gate.shape)
        gated(by_rows(gate), by_rows(up), self.caps, by_rows(out))
        return out

    @abstractmethod
    def formula(self, gate: Tensor, up: Tensor) -> Tensor:
        """Compute it in PyTorch, float32."""


class SiluGlu(Activation):
    """SiLU(gate) * up."""

    def formula(self, gate: Tensor, up: Tensor) -> Tensor:
        """[..., I] and [..., I] -> [..., I]."""
        return F.silu(gate) * up


class SituGlu(Activation):
    """SiTU (Kimi K3, arXiv 2607.24653): b tanh(gate/b) sigmoid(gate) * l tanh(up/l).

    The sigmoid takes the uncapped gate; b null counts as 1; l null leaves `up` as it is.
    """

    def __init__(self, beta: float | None, linear_beta: float | None) -> None:
        """Keep the caps, also as 0-dim CPU tensors: they mix with every device, and cost less than Python numbers."""
        cap = 1.0 if beta is None else beta
        self.caps = Caps(cap, linear_beta or 0.0)
        self.per_cap = torch.tensor(1 / cap, device="cpu")
        self.per_up_cap = None if linear_beta is None else torch.tensor(1 / linear_beta, device="cpu")
        self.both_caps = torch.tensor(cap * (1.0 if linear_beta is None else linear_beta), device="cpu")

    def formula(self, gate: Tensor, up: Tensor) -> Tensor:
        """[..., I] and [..., I] -> [..., I]."""
        if self.per_up_cap is not None:
            up = torch.tanh(up * self.per_up_cap)
        return torch.tanh(gate * self.per_cap) * torch.sigmoid(gate) * self.both_caps * up


def make_activation(config: KimiK3Config) -> Activation:
    """Return the gated activation act(gate, up) of the configuration, computed in float32."""
    if config.hidden_act == "situ":
        return SituGlu(config.activation_situ_beta, config.activation_situ_linear_beta)
    return SiluGlu()


def normed_mix(h: Tensor, blocks: list[Tensor], norm: RMSNorm, proj: nn.Linear, out_norm: RMSNorm) -> Tensor:
    """`out_norm` of `mix_residuals`, whose arguments it takes: [B,T,D] float32."""
    sources = [*blocks, h]
    if not runs_compiled(norm.weight, out_norm.weight, *sources):
        normed: Tensor = out_norm(mix_residuals(h, blocks, norm, proj))
        return normed
    scale, floor = norm.scale_and_floor()
    query = norm.weight * proj.weight[0].float() * scale  # [D]
    out = torch.empty(h.shape)
    rows = [source.contiguous() for source in sources]
    mixed_norm(rows, query, floor, out_norm.weight, *out_norm.scale_and_floor(), by_rows(out))
    return out


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
    query = norm.weight * proj.weight[0]  # [D]
    with without_autocast(h.device):
        scores = (values @ query) * per_rms(values, norm.eps).squeeze(-1)  # [B,T,N]
        return (torch.softmax(scores, dim=-1).unsqueeze(-2) @ values).squeeze(-2)
