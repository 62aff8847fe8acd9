"""The feed-forward layers for one token of every sequence.

Letters: B sequences, D hidden size, L latent width (D without one), I inner width of an expert, k chosen experts.
"""

from typing import cast

import torch
from torch import Tensor

from kimik3_cli.engine.model.ffn import DenseFfn, Expert, LatentMoe
from kimik3_cli.engine.model.step_parts import (
    GatedStep,
    NormStep,
    Projections,
    accumulate,
    can_multiply,
    new_buffer,
    project_into,
)
from kimik3_cli.engine.native.operations import RoutedExperts


class DenseStep:
    """What `DenseFfn` computes for one token."""

    def __init__(self, layer: DenseFfn, batch: int) -> None:
        """Prepare the weights."""
        self.down = Projections([layer.down_proj.weight], batch)
        self.activate = GatedStep(layer.activation, batch, layer.down_proj.weight.shape[1], layer.down_proj.weight)
        inputs = [layer.gate_proj.weight, layer.up_proj.weight]
        self.project_inputs = Projections(inputs, batch, out=self.activate.both)

    def __call__(self, x: Tensor, total: Tensor) -> Tensor:
        """Normed x [B,D] -> total [B,D] plus the layer's output."""
        self.project_inputs(x)
        return self.down(self.activate(), total)


class MoeStep:
    """What `LatentMoe` computes for one token: only the chosen experts are touched."""

    def __init__(self, layer: LatentMoe, batch: int) -> None:
        """Prepare the weights."""
        self.score = Projections([layer.gate.weight.float()], batch)
        self.shared = DenseStep(layer.shared_experts, batch) if layer.has_shared else None
        experts = [(e.w1.weight, e.w3.weight, e.w2.weight) for e in cast(list[Expert], list(layer.experts))]
        out = new_buffer(experts[0][0], batch, experts[0][0].shape[1])  # [B,L]
        self.routed: RoutedExperts | RoutedStep
        if batch == 1 and can_multiply(weight for expert in experts for weight in expert):
            self.routed = RoutedExperts(experts, layer.gate.routing(), layer.activation.caps, out)
        else:
            self.routed = RoutedStep(layer, out)
        self.out = out
        self.to_latent = None
        if layer.has_latent:
            self.to_latent = Projections([layer.routed_expert_down_proj.weight], batch)
            self.from_latent = Projections([layer.routed_expert_up_proj.weight], batch)
            self.nothing = torch.zeros_like(out)
        self.norm = NormStep(layer.routed_expert_norm, batch) if layer.has_norm else None

    def __call__(self, x: Tensor, total: Tensor) -> Tensor:
        """Normed x [B,D] -> total [B,D] plus the layer's output."""
        logits = self.score(x)  # [B,E]
        if self.shared is not None:
            total = self.shared(x, total)
        if self.to_latent is None:
            self.routed(logits, x, total)
            return self.out
        self.routed(logits, self.to_latent(x), self.nothing)
        return self.from_latent(self.out if self.norm is None else self.norm(self.out), total)


class RoutedStep:
    """What the compiled `RoutedExperts` computes."""

    def __init__(self, layer: LatentMoe, out: Tensor) -> None:
        """Prepare the weights, [in,out]."""
        self.gate, self.mixture, self.out = layer.gate, layer.mixture, out
        experts = cast(list[Expert], list(layer.experts))
        self.experts = [(expert.w1.weight.t(), expert.w3.weight.t(), expert.w2.weight.t()) for expert in experts]
        # the chosen experts' inner rows lie together, so that the activation runs once over all of them
        width = len(experts[0].w1.weight)
        self.activate = GatedStep(layer.activation, layer.gate.chosen, width, experts[0].w1.weight)
        rows = torch.split(self.activate.both, 1)  # k times [1,2*I]
        self.gate_up = [torch.split(row, width, dim=-1) for row in rows]  # k times [1,I] twice
        self.inner = torch.split(self.activate.out, 1)  # k times [1,I]

    def __call__(self, logits: Tensor, x: Tensor, total: Tensor) -> None:
        """Write total [B,L] plus the share of x [B,L] of the experts that logits [B,E] choose to `out`."""
        experts, weights = self.gate.choose(logits)  # [B,k] twice
        if len(x) > 1:
            torch.add(total, self.mixture(x, experts, weights), out=self.out)
            return
        chosen = [self.experts[expert] for expert in experts[0].tolist()]
        for (w1, w3, _), (gate, up) in zip(chosen, self.gate_up, strict=True):
            project_into(gate, x, w1)
            project_into(up, x, w3)
        self.activate()
        for (_, _, w2), row, weight in zip(chosen, self.inner, weights[0].tolist(), strict=True):
            total = accumulate(total, row, w2, weight)
        self.out.copy_(total)
