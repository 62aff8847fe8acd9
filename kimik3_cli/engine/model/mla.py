"""A full-attention layer: gated multi-head latent attention without positional encoding.

Letters: B batch, T new tokens, L all tokens so far, D hidden size, H heads, N nope and R rope slice of a query or key,
V value size, C latent width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kimik3_cli.engine.cache import MlaState
from kimik3_cli.engine.config import KimiK3Config
from kimik3_cli.engine.model.parts import RMSNorm, linear

LATENT_EPS = 1e-6


class MlaAttention(nn.Module):
    """NoPE MLA (Kimi Linear, arXiv 2510.26692; output gate: Kimi K3, arXiv 2607.24653): nothing is ever rotated."""

    def __init__(self, config: KimiK3Config) -> None:
        """Create the parameters under the checkpoint's names; the configuration guarantees the sizes."""
        super().__init__()
        self.heads, self.latent_dim = config.num_attention_heads or 0, config.kv_lora_rank or 0
        self.nope_dim, self.rope_dim = config.qk_nope_head_dim or 0, config.qk_rope_head_dim or 0
        self.value_dim = config.v_head_dim or 0
        self.scale = (self.nope_dim + self.rope_dim) ** -0.5
        hidden, query_width = config.hidden_size, self.heads * (self.nope_dim + self.rope_dim)
        self.low_rank_query = config.q_lora_rank is not None
        if config.q_lora_rank is not None:
            self.q_a_proj = linear(hidden, config.q_lora_rank)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_EPS)
            self.q_b_proj = linear(config.q_lora_rank, query_width)
        else:
            self.q_proj = linear(hidden, query_width)
        self.kv_a_proj_with_mqa = linear(hidden, self.latent_dim + self.rope_dim)
        self.kv_a_layernorm = RMSNorm(self.latent_dim, LATENT_EPS)
        self.kv_b_proj = linear(self.latent_dim, self.heads * (self.nope_dim + self.value_dim))
        self.o_proj = linear(self.heads * self.value_dim, hidden)
        self.gated = config.mla_use_output_gate
        if self.gated:
            self.g_proj = linear(hidden, self.heads * self.value_dim)

    def forward(self, x: Tensor, state: MlaState | None = None) -> Tensor:
        """[B,T,D] -> [B,T,D]; a given state is read and extended by T tokens."""
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if self.low_rank_query else self.q_proj(x)
        q = self._heads(q)  # [B,H,T,N+R]
        latent, shared_key = torch.split(self.kv_a_proj_with_mqa(x), [self.latent_dim, self.rope_dim], dim=-1)
        latent = torch.cat([self.kv_a_layernorm(latent), shared_key.float()], dim=-1)  # [B,T,C+R]
        attended = self._expanded(q, latent) if state is None else self._absorbed(q, state.append(latent))  # [B,H,T,V]
        o = attended.transpose(1, 2).flatten(-2)  # [B,T,H*V]
        if self.gated:
            o = o * torch.sigmoid(self.g_proj(x).float())
        y: Tensor = self.o_proj(o)
        return y

    def _heads(self, x: Tensor) -> Tensor:
        """[B,T,H*X] -> [B,H,T,X]."""
        return x.view(*x.shape[:-1], self.heads, -1).transpose(1, 2)

    def _expanded(self, q: Tensor, latent: Tensor) -> Tensor:
        """Attend among T tokens with keys and values of full size: q [B,H,T,N+R], latent [B,T,C+R] -> [B,H,T,V]."""
        latent, shared_key = latent[..., : self.latent_dim], latent[..., self.latent_dim :]
        expanded = self._heads(self.kv_b_proj(latent))  # [B,H,T,N+V]
        k_nope, v = expanded[..., : self.nope_dim], expanded[..., self.nope_dim :]
        k_shared = shared_key.unsqueeze(1).expand(-1, self.heads, -1, -1).to(k_nope.dtype)
        k = torch.cat([k_nope, k_shared], dim=-1)  # [B,H,T,N+R]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)

    def _absorbed(self, q: Tensor, latent: Tensor) -> Tensor:
        """Attend on the latents: q [B,H,T,N+R], latent [B,L,C+R] whose last T are the queries' own -> [B,H,T,V].

        kv_b_proj is applied to the query and to the attended latent instead of to every token's latent
        (DeepSeek-V2, arXiv 2405.04434, section 2.1.2).
        """
        batch, _, new, _ = q.shape
        total = latent.shape[1]
        expand = self.kv_b_proj.weight.view(self.heads, -1, self.latent_dim)  # [H,N+V,C]
        to_key, to_value = expand[:, : self.nope_dim], expand[:, self.nope_dim :]
        q_latent = q[..., : self.nope_dim] @ to_key  # [B,H,T,C]
        queries = torch.cat([q_latent, q[..., self.nope_dim :]], dim=-1).view(batch, self.heads * new, -1)
        scores = (queries @ latent.transpose(1, 2).to(queries.dtype)).float() * self.scale  # [B,H*T,L]
        if new > 1:
            later = torch.ones(new, total, dtype=torch.bool, device=q.device).triu(total - new + 1)
            scores = scores.view(batch, self.heads, new, total).masked_fill(later, float("-inf")).view_as(scores)
        weights = torch.softmax(scores, dim=-1)
        attended = (weights @ latent[..., : self.latent_dim]).view(batch, self.heads, new, -1)  # [B,H,T,C]
        return attended @ to_value.transpose(1, 2)
