"""The feed-forward layers for one token of every sequence.

Letters: B sequences, D hidden size, L latent width (D without one), k chosen experts.
"""

from typing import cast

import torch
from torch import Tensor

from kimik3_cli.engine.model.ffn import DenseFfn, Expert, LatentMoe
from kimik3_cli.engine.model.step_parts import NormStep, accumulate, project


class DenseStep:
    """What `DenseFfn` computes for one token."""

    def __init__(self, layer: DenseFfn) -> None:
        """Prepare the weights, [in,out]."""
        self.gate, self.up, self.down = (proj.weight.t() for proj in (layer.gate_proj, layer.up_proj, layer.down_proj))
        self.activation = layer.activation

    def __call__(self, x: Tensor, total: Tensor) -> Tensor:
        """Normed x [B,D] -> total [B,D] plus the layer's output."""
        return accumulate(total, self.activation(project(x, self.gate), project(x, self.up)), self.down)


class MoeStep:
    """What `LatentMoe` computes for one token: only the chosen experts are touched."""

    def __init__(self, layer: LatentMoe) -> None:
        """Prepare the weights, [in,out]."""
        self.router, self.mixture = layer.gate, layer.mixture
        experts = cast(list[Expert], list(layer.experts))
        self.experts = [(expert.w1.weight.t(), expert.w3.weight.t(), expert.w2.weight.t()) for expert in experts]
        self.activation = layer.activation
        self.shared = DenseStep(layer.shared_experts) if layer.has_shared else None
        self.latent = (
            (layer.routed_expert_down_proj.weight.t(), layer.routed_expert_up_proj.weight.t())
            if layer.has_latent
            else None
        )
        self.norm = NormStep(layer.routed_expert_norm) if layer.has_norm else None

    def __call__(self, x: Tensor, total: Tensor) -> Tensor:
        """Normed x [B,D] -> total [B,D] plus the layer's output."""
        experts, weights = self.router(x)  # [B,k] twice
        if self.shared is not None:
            total = self.shared(x, total)
        if self.latent is None:
            return self._add_routed(total, x, experts, weights)
        down, up = self.latent
        latent = project(x, down)  # [B,L]
        routed = self._add_routed(torch.zeros_like(latent), latent, experts, weights)
        return accumulate(total, routed if self.norm is None else self.norm(routed), up)

    def _add_routed(self, total: Tensor, latent: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        if len(latent) > 1:
            return total + self.mixture(latent, experts, weights)
        for expert, weight in zip(experts[0].tolist(), weights[0].tolist(), strict=True):
            w1, w3, w2 = self.experts[expert]
            total = accumulate(total, self.activation(project(latent, w1), project(latent, w3)), w2, weight)
        return total
