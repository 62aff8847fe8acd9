"""The feed-forward layers for one token of every sequence.

Letters: B sequences, D hidden size, L latent width (D without one), I inner width of an expert, k chosen experts.
"""

from typing import cast

import torch
from torch import Tensor

from kimik3_cli.engine.model.ffn import DenseFfn, Expert, LatentMoe
from kimik3_cli.engine.model.layout import joined
from kimik3_cli.engine.model.step_parts import GatedStep, NormStep, Projections, accumulate, project_into


class DenseStep:
    """What `DenseFfn` computes for one token."""

    def __init__(self, layer: DenseFfn, batch: int) -> None:
        """Prepare the weights, [in,out]."""
        self.down = layer.down_proj.weight.t()
        self.activate = GatedStep(layer.activation, batch, len(self.down), self.down)
        inputs = joined([layer.gate_proj.weight, layer.up_proj.weight])
        self.project_inputs = Projections(inputs, batch, out=self.activate.both)

    def __call__(self, x: Tensor, total: Tensor) -> Tensor:
        """Normed x [B,D] -> total [B,D] plus the layer's output."""
        self.project_inputs(x)
        return accumulate(total, self.activate(), self.down)


class MoeStep:
    """What `LatentMoe` computes for one token: only the chosen experts are touched."""

    def __init__(self, layer: LatentMoe, batch: int) -> None:
        """Prepare the weights, [in,out]."""
        self.gate, self.mixture = layer.gate, layer.mixture
        self.score = Projections([layer.gate.weight.float().t()], batch)
        experts = cast(list[Expert], list(layer.experts))
        self.experts = [(expert.w1.weight.t(), expert.w3.weight.t(), expert.w2.weight.t()) for expert in experts]
        # the chosen experts' inner rows lie together, so that the activation runs once over all of them
        width = len(experts[0].w1.weight)
        self.activate = GatedStep(layer.activation, layer.gate.chosen, width, experts[0].w1.weight)
        self.gate_up = [row.split(width, dim=-1) for row in self.activate.both.split(1)]  # k times [1,I] twice
        self.inner = self.activate.out.split(1)  # k times [1,I]
        self.shared = DenseStep(layer.shared_experts, batch) if layer.has_shared else None
        self.to_latent = None
        if layer.has_latent:
            self.to_latent = Projections([layer.routed_expert_down_proj.weight.t()], batch)
            self.from_latent = layer.routed_expert_up_proj.weight.t()
            self.nothing = torch.zeros_like(self.to_latent.out)  # [B,L]
        self.norm = NormStep(layer.routed_expert_norm, batch) if layer.has_norm else None

    def __call__(self, x: Tensor, total: Tensor) -> Tensor:
        """Normed x [B,D] -> total [B,D] plus the layer's output."""
        logits = self.score(x)  # [B,E]
        if self.shared is not None:
            total = self.shared(x, total)
        if self.to_latent is None:
            return self._add_routed(total, x, logits)
        routed = self._add_routed(self.nothing, self.to_latent(x), logits)  # [B,L]
        return accumulate(total, routed if self.norm is None else self.norm(routed), self.from_latent)

    def _add_routed(self, total: Tensor, latent: Tensor, logits: Tensor) -> Tensor:
        """Add the weighted outputs of the chosen experts to total [B,L]."""
        if len(latent) > 1:
            return total + self.mixture(latent, *self.gate.choose(logits))
        experts, weights = self.gate.choose_for_one(logits)
        chosen = [self.experts[expert] for expert in experts]
        for (w1, w3, _), (gate, up) in zip(chosen, self.gate_up, strict=True):
            project_into(gate, latent, w1)
            project_into(up, latent, w3)
        self.activate()
        for (_, _, w2), row, weight in zip(chosen, self.inner, weights, strict=True):
            total = accumulate(total, row, w2, weight)
        return total
