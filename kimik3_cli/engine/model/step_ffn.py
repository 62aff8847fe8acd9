"""The feed-forward layers for one token of every sequence.

Letters: B sequences, D hidden size, L latent width (D without one), I inner width of an expert, k chosen experts.
"""

from typing import cast

import torch
from torch import Tensor

from kimik3_cli.engine.model.ffn import DenseFfn, Expert, LatentMoe
from kimik3_cli.engine.model.layout import joined
from kimik3_cli.engine.model.step_parts import NormStep, accumulate, project, project_all, project_into


class DenseStep:
    """What `DenseFfn` computes for one token."""

    def __init__(self, layer: DenseFfn) -> None:
        """Prepare the weights, [in,out]."""
        self.inputs, self.down = joined([layer.gate_proj.weight, layer.up_proj.weight]), layer.down_proj.weight.t()
        self.activation = layer.activation

    def __call__(self, x: Tensor, total: Tensor) -> Tensor:
        """Normed x [B,D] -> total [B,D] plus the layer's output."""
        gate, up = project_all(x, self.inputs).chunk(2, dim=-1)
        return accumulate(total, self.activation(gate, up), self.down)


class MoeStep:
    """What `LatentMoe` computes for one token: only the chosen experts are touched."""

    def __init__(self, layer: LatentMoe) -> None:
        """Prepare the weights, [in,out]."""
        self.choose, self.router = layer.gate.choose, layer.gate.weight.float().t()
        self.mixture = layer.mixture
        experts = cast(list[Expert], list(layer.experts))
        self.experts = [(expert.w1.weight.t(), expert.w3.weight.t(), expert.w2.weight.t()) for expert in experts]
        self.activation = layer.activation
        # the chosen experts' inner rows lie together, so that the activation runs once over all of them
        inner = torch.empty(2, layer.gate.chosen, 1, experts[0].w1.weight.shape[0], device=self.router.device)
        self.gate_rows, self.up_rows = (rows.unbind() for rows in inner)  # k times [1,I]
        self.inner = inner.squeeze(2).unbind()  # [k,I] twice
        self.shared = DenseStep(layer.shared_experts) if layer.has_shared else None
        self.latent = (
            (layer.routed_expert_down_proj.weight.t(), layer.routed_expert_up_proj.weight.t())
            if layer.has_latent
            else None
        )
        self.norm = NormStep(layer.routed_expert_norm) if layer.has_norm else None

    def __call__(self, x: Tensor, total: Tensor) -> Tensor:
        """Normed x [B,D] -> total [B,D] plus the layer's output."""
        experts, weights = self.choose(project(x, self.router))  # [B,k] twice
        if self.shared is not None:
            total = self.shared(x, total)
        if self.latent is None:
            return self._add_routed(total, x, experts, weights)
        down, up = self.latent
        latent = project(x, down)  # [B,L]
        routed = self._add_routed(torch.zeros_like(latent), latent, experts, weights)
        return accumulate(total, routed if self.norm is None else self.norm(routed), up)

    def _add_routed(self, total: Tensor, latent: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Add the weighted outputs of the chosen experts to total [B,L]."""
        if len(latent) > 1:
            return total + self.mixture(latent, experts, weights)
        chosen = [self.experts[expert] for expert in experts[0].tolist()]
        for (w1, w3, _), gate, up in zip(chosen, self.gate_rows, self.up_rows, strict=True):
            project_into(gate, latent, w1)
            project_into(up, latent, w3)
        rows = torch.split(self.activation(*self.inner), 1)
        for (_, _, w2), row, weight in zip(chosen, rows, weights[0].tolist(), strict=True):
            total = accumulate(total, row, w2, weight)
        return total
