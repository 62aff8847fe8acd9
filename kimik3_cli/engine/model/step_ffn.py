"""The feed-forward layers for one token of every sequence.

Letters: B sequences, D hidden size, L latent width (D without one), I inner width of an expert, k chosen experts.
"""

from typing import cast

import torch
from torch import Tensor

from kimik3_cli.engine.model.ffn import DenseFfn, Expert, LatentMoe
from kimik3_cli.engine.model.step_parts import NormStep, accumulate, project, project_into


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
    """What `LatentMoe` computes for one token: only the chosen experts are touched.

    For one sequence the inner rows of all chosen experts, and of the shared ones, lie in one buffer, so that the
    activation runs once over all of them.
    """

    def __init__(self, layer: LatentMoe) -> None:
        """Prepare the weights, [in,out], and the buffer."""
        self.choose, self.router = layer.gate.choose, layer.gate.weight.float().t()
        self.mixture = layer.mixture
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
        width = experts[0].w1.weight.shape[0]
        self.rows = [layer.gate.chosen, 0 if self.shared is None else self.shared.gate.shape[1] // width]  # [k,shared]
        inner = torch.empty(2, sum(self.rows), width, device=self.router.device)
        self.inner_gate, self.inner_up = inner  # [k+shared,I] twice
        chosen, shared = inner.split(self.rows, dim=1)
        self.chosen_inner = [row.unbind() for row in chosen.unsqueeze(2).unbind(1)]  # k pairs of [1,I]
        self.shared_inner = shared.flatten(1).unsqueeze(1).unbind()  # a pair of [1,shared*I]

    def __call__(self, x: Tensor, total: Tensor) -> Tensor:
        """Normed x [B,D] -> total [B,D] plus the layer's output."""
        experts, weights = self.choose(project(x, self.router))  # [B,k] twice
        latent = x if self.latent is None else project(x, self.latent[0])  # [B,L]
        if len(x) > 1:
            total = total if self.shared is None else self.shared(x, total)
            return self._add_routed(total, self.mixture(latent, experts, weights))
        chosen = [self.experts[expert] for expert in experts[0].tolist()]
        for (w1, w3, _), (gate, up) in zip(chosen, self.chosen_inner, strict=True):
            project_into(gate, latent, w1)
            project_into(up, latent, w3)
        if self.shared is not None:
            project_into(self.shared_inner[0], x, self.shared.gate)
            project_into(self.shared_inner[1], x, self.shared.up)
        inner = self.activation(self.inner_gate, self.inner_up)  # [k+shared,I]
        chosen_inner, shared_inner = inner.split(self.rows)
        if self.shared is not None:
            total = accumulate(total, shared_inner.view(1, -1), self.shared.down)
        routed = total if self.latent is None else torch.zeros_like(latent)
        for (_, _, w2), row, weight in zip(chosen, chosen_inner.split(1), weights[0].tolist(), strict=True):
            routed = accumulate(routed, row, w2, weight)
        return routed if self.latent is None else self._add_routed(total, routed)

    def _add_routed(self, total: Tensor, routed: Tensor) -> Tensor:
        """Add the experts' weighted sum [B,L] to total [B,D]."""
        if self.latent is None:
            return total + routed
        return accumulate(total, routed if self.norm is None else self.norm(routed), self.latent[1])
