"""A full-attention layer: gated multi-head latent attention without positional encoding.

Letters: B batch, T new tokens, L all tokens so far, D hidden size, H heads, N nope and R rope slice of a query or key,
V value size, C latent width.
"""

import torch
from torch import Tensor, nn

from kimik3_cli.engine.cache import MlaState
from kimik3_cli.engine.config import KimiK3Config
from kimik3_cli.engine.model.parts import RMSNorm, linear

LATENT_EPS = 1e-6
QUERY_BLOCK = 128


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
        among_new = state is None or state.length == 0
        rows = latent if state is None else state.append(latent)  # [B,L,C+R]
        attended = self._expanded(q, latent) if among_new else self._absorbed(q, rows)  # [B,H,T,V]
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
        q, k, v = q.flatten(0, 1).unsqueeze(1), k.flatten(0, 1), v.flatten(0, 1)  # every head has keys of its own
        return causal_attention(q, k, v, self.scale).view(-1, self.heads, q.shape[2], self.value_dim)

    def _absorbed(self, q: Tensor, latent: Tensor) -> Tensor:
        """Attend on the latents: q [B,H,T,N+R], latent [B,L,C+R] whose last T are the queries' own -> [B,H,T,V].

        kv_b_proj is applied to the query and to the attended latent instead of to every token's latent
        (DeepSeek-V2, arXiv 2405.04434, section 2.1.2).
        """
        expand = self.kv_b_proj.weight.view(self.heads, -1, self.latent_dim)  # [H,N+V,C]
        to_key, to_value = expand[:, : self.nope_dim], expand[:, self.nope_dim :]
        q_latent = q[..., : self.nope_dim] @ to_key  # [B,H,T,C]
        queries = torch.cat([q_latent, q[..., self.nope_dim :]], dim=-1)  # [B,H,T,C+R]
        attended = causal_attention(queries, latent, latent[..., : self.latent_dim], self.scale)  # [B,H,T,C]
        return attended @ to_value.transpose(1, 2)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Softmax attention, softmax in float32, a block of queries at a time: its memory grows with T + L, not T * L.

    torch's own fast attention is not used: on a CPU it answers NaN keys with zeros, and damage has to show.

    Letters: G groups that share keys and values, J query heads of a group, X key and Y value size.

    Args:
        q: [G,J,T,X], the queries of the last T of L tokens.
        k: [G,L,X]; v: [G,L,Y].
        scale: factor of the scores.

    Returns:
        [G,J,T,Y].
    """
    groups, heads, new, width = q.shape
    before = k.shape[1] - new
    outputs = []
    for start in range(0, new, QUERY_BLOCK):
        queries = q[:, :, start : start + QUERY_BLOCK]
        count = queries.shape[2]  # n
        seen = before + start + count
        later = q.new_full((count, seen), float("-inf")).triu(before + start + 1).repeat(heads, 1)  # [J*n,seen]
        keys = k[:, :seen].transpose(1, 2).to(q.dtype)
        scores = torch.baddbmm(later, queries.reshape(groups, -1, width), keys, alpha=scale)  # [G,J*n,seen]
        attended = torch.bmm(torch.softmax(scores.float(), dim=-1), v[:, :seen])  # [G,J*n,Y]
        outputs.append(attended.view(groups, heads, count, -1))
    return torch.cat(outputs, dim=2)
