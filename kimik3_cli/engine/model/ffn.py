"""Feed-forward layers: dense, router, experts, latent mixture of experts.

Letters: B batch, T time, N = B*T tokens, D hidden size, L latent width (D without one), E experts, k chosen a token.
"""

from typing import cast

import torch
from torch import Tensor, nn

from kimik3_cli.engine.config import KimiK3Config
from kimik3_cli.engine.model.parts import RMSNorm, linear, linear_fp32, make_activation
from kimik3_cli.engine.native.operations import Routing

RENORMALISE_EPS = 1e-20


class DenseFfn(nn.Module):
    """down_proj(act(gate_proj x, up_proj x))."""

    def __init__(self, config: KimiK3Config, width: int) -> None:
        """Create the three projections of inner size `width`."""
        super().__init__()
        self.gate_proj, self.up_proj = linear(config.hidden_size, width), linear(config.hidden_size, width)
        self.down_proj = linear(width, config.hidden_size)
        self.activation = make_activation(config)

    def forward(self, x: Tensor) -> Tensor:
        """[B,T,D] -> [B,T,D]."""
        y: Tensor = self.down_proj(self.activation(self.gate_proj(x), self.up_proj(x)))
        return y


class Expert(nn.Module):
    """The weights of w2 act(w1 x, w3 x): w1 is the gate, w3 the up projection."""

    def __init__(self, size: int, width: int) -> None:
        """Create the projections from and to `size` channels."""
        super().__init__()
        self.w1, self.w3, self.w2 = linear(size, width), linear(size, width), linear(width, size)


class Router(nn.Module):
    """Chooses experts by biased scores and weights them by the unbiased ones; float32 throughout."""

    def __init__(self, config: KimiK3Config) -> None:
        """Keep the sizes; the configuration has checked that they fit together."""
        super().__init__()
        experts = config.num_experts or 0
        self.weight = nn.Parameter(torch.zeros(experts, config.hidden_size))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(experts))
        self.chosen = config.num_experts_per_token or 0
        self.groups, self.topk_group = config.num_expert_group, config.topk_group
        self.softmax = config.moe_router_activation_func == "softmax"
        self.renormalise = config.moe_renormalize and self.chosen > 1
        self.scaling_factor = torch.tensor(config.routed_scaling_factor, device="cpu")  # 0-dim: mixes with every device

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[N,D] -> chosen experts [N,k] int64 and their weights [N,k] float32."""
        return self.choose(linear_fp32(x, self.weight))

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [N,E] float32 -> chosen experts [N,k] int64 and their weights [N,k] float32."""
        scores = torch.softmax(logits, dim=-1) if self.softmax else torch.sigmoid(logits)
        experts = largest(self._within_groups(scores + self.e_score_correction_bias.float()), self.chosen)  # [N,k]
        weights = scores.gather(-1, experts)
        if self.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + RENORMALISE_EPS)
        return experts, weights * self.scaling_factor

    def routing(self) -> Routing:
        """Describe the choice to the compiled operations."""
        return Routing(
            chosen=self.chosen,
            groups=self.groups,
            kept_groups=self.topk_group,
            softmax=self.softmax,
            renormalise=self.renormalise,
            factor=self.scaling_factor.item(),
            bias=self.e_score_correction_bias.float(),
        )

    def _within_groups(self, biased: Tensor) -> Tensor:
        """Rule out experts outside the groups whose two best biased scores sum highest, [N,E] -> [N,E]."""
        if self.groups == 1:
            return biased
        grouped = biased.view(len(biased), self.groups, -1)  # [N,groups,E/groups]
        rank = grouped.topk(2, dim=-1).values.sum(-1)  # [N,groups]
        kept = largest(rank, self.topk_group)
        ruled_out = torch.ones_like(rank, dtype=torch.bool).scatter(-1, kept, False)
        return grouped.masked_fill(ruled_out.unsqueeze(-1), float("-inf")).flatten(-2)


def largest(values: Tensor, count: int) -> Tensor:
    """Positions of the `count` largest of [N,X], [N,count]: of equal ones the first, on every device and path."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


class LatentMoe(nn.Module):
    """Stable latent mixture of experts (Kimi K3, arXiv 2607.24653); without a latent, experts see the hidden size."""

    def __init__(self, config: KimiK3Config) -> None:
        """Create router, experts, and what the configuration has of shared experts, latent projections and norm."""
        super().__init__()
        hidden, latent = config.hidden_size, config.routed_expert_hidden_size
        width = config.moe_intermediate_size or 0
        self.gate = Router(config)
        self.activation = make_activation(config)
        self.experts = nn.ModuleList(Expert(latent or hidden, width) for _ in range(config.num_experts or 0))
        if config.num_shared_experts:
            self.shared_experts = DenseFfn(config, config.num_shared_experts * width)
        if latent is not None:
            self.routed_expert_down_proj = linear(hidden, latent)
            self.routed_expert_up_proj = linear(latent, hidden)
            if config.latent_moe_use_norm:
                self.routed_expert_norm = RMSNorm(latent, config.rms_norm_eps)
        self.has_shared, self.has_latent = config.num_shared_experts > 0, latent is not None
        self.has_norm = self.has_latent and config.latent_moe_use_norm

    def forward(self, x: Tensor) -> Tensor:
        """[B,T,D] -> [B,T,D]."""
        tokens = x.flatten(0, -2)  # [N,D]
        experts, weights = self.gate(tokens)
        routed = self.mixture(self.routed_expert_down_proj(tokens) if self.has_latent else tokens, experts, weights)
        if self.has_norm:
            routed = self.routed_expert_norm(routed)
        if self.has_latent:
            routed = self.routed_expert_up_proj(routed)
        y: Tensor = routed.view(x.shape)
        if self.has_shared:
            y = y + self.shared_experts(x)
        return y

    def mixture(self, latent: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of the chosen experts' outputs: latent [N,L], experts and weights [N,k] -> [N,L] float32.

        Rows are sorted by expert, so that each chosen expert is one matrix product and the others cost nothing; the
        activation runs once over all rows.
        """
        chosen = experts.shape[-1]
        by_expert = experts.flatten().argsort(stable=True)  # [N*k], positions in the flat choice
        counts = experts.flatten().bincount(minlength=len(self.experts)).tolist()
        used = [(cast(Expert, expert), count) for expert, count in zip(self.experts, counts, strict=True) if count]
        sizes = [count for _, count in used]
        inputs = torch.split(latent[by_expert // chosen], sizes)
        gate = torch.cat([expert.w1(rows) for (expert, _), rows in zip(used, inputs, strict=True)])  # [N*k,I]
        up = torch.cat([expert.w3(rows) for (expert, _), rows in zip(used, inputs, strict=True)])
        inner = torch.split(self.activation(gate, up), sizes)
        outputs = torch.cat([expert.w2(rows) for (expert, _), rows in zip(used, inner, strict=True)])  # [N*k,L]
        in_order = outputs.float()[by_expert.argsort()].view(*experts.shape, -1)  # [N,k,L]
        return (in_order * weights.unsqueeze(-1)).sum(-2)
