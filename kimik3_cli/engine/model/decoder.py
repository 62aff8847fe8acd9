"""The whole network: order of work in a layer, residual blocks, head.

Letters: B batch, T time, D hidden size, V vocabulary.
"""

import torch
from torch import Tensor, nn

from kimik3_cli.engine.cache import DecodeCache, KdaState, MlaState
from kimik3_cli.engine.config import KimiK3Config
from kimik3_cli.engine.model.ffn import DenseFfn, LatentMoe
from kimik3_cli.engine.model.kda import KdaAttention
from kimik3_cli.engine.model.mla import MlaAttention
from kimik3_cli.engine.model.parts import RMSNorm, linear, normed_mix


class DecoderLayer(nn.Module):
    """Attention and feed-forward of one layer, with attention residuals or plain ones."""

    def __init__(self, config: KimiK3Config, index: int) -> None:
        """Create layer `index`, counted from 0."""
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.self_attn = KdaAttention(config) if config.is_kda(index) else MlaAttention(config)
        self.mixes_residuals = config.attn_res_block_size is not None
        if config.attn_res_block_size is not None:
            self.self_attention_res_norm, self.self_attention_res_proj = RMSNorm(hidden, eps), linear(hidden, 1)
            self.mlp_res_norm, self.mlp_res_proj = RMSNorm(hidden, eps), linear(hidden, 1)
            self.starts_block = index % config.attn_res_block_size == 0
        if config.is_moe(index):
            self.block_sparse_moe = LatentMoe(config)
        else:
            self.mlp = DenseFfn(config, config.intermediate_size)
        self.is_moe = config.is_moe(index)

    def forward(
        self, h: Tensor, blocks: list[Tensor], state: KdaState | MlaState | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Advance the running sum h [B,T,D] and the finished residual blocks; a given state is advanced too."""
        ffn = self.block_sparse_moe if self.is_moe else self.mlp
        if not self.mixes_residuals:
            h = h + self.self_attn(self.input_layernorm(h), state)
            return h + ffn(self.post_attention_layernorm(h)), blocks
        mix = self.self_attention_res_norm, self.self_attention_res_proj
        attended = self.self_attn(normed_mix(h, blocks, *mix, self.input_layernorm), state)
        if self.starts_block:
            h, blocks = attended, [*blocks, h]
        else:
            h = h + attended
        mix = self.mlp_res_norm, self.mlp_res_proj
        return h + ffn(normed_mix(h, blocks, *mix, self.post_attention_layernorm)), blocks


class KimiK3(nn.Module):
    """A Kimi K3 language model (arXiv 2607.24653) or its Kimi Linear subset; parameter names are the checkpoint's."""

    def __init__(self, config: KimiK3Config) -> None:
        """Create the network of `config`; a tied head shares the embedding's parameter."""
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        if config.attn_res_block_size is not None:
            self.output_attn_res_norm = RMSNorm(hidden, config.rms_norm_eps)
            self.output_attn_res_proj = linear(hidden, 1)
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = linear(hidden, config.vocab_size)
        self.tie_head()

    def tie_head(self) -> None:
        """Let a tied head be the embedding's own parameter; assigning weights breaks the tie, so loading repeats it."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.embed_tokens.weight.device

    def forward(self, ids: Tensor) -> Tensor:
        """Logits after every position: [B,T] int64 -> [B,T,V]."""
        logits: Tensor = self.lm_head(self.hidden(ids))
        return logits

    def hidden(self, ids: Tensor, cache: DecodeCache | None = None) -> Tensor:
        """Final normed hidden states: [B,T] int64 -> [B,T,D] float32.

        A given cache holds the tokens before; it is read, and advanced by T tokens.

        Raises:
            RequestError: the tokens do not fit the cache; nothing was computed.
        """
        if cache is not None:
            cache.reserve(ids.shape[1])
        states = [None] * len(self.layers) if cache is None else cache.states
        h = self.embed_tokens(ids).float()
        blocks: list[Tensor] = []
        for layer, state in zip(self.layers, states, strict=True):
            h, blocks = layer(h, blocks, state)
        if self.config.attn_res_block_size is not None:
            return normed_mix(h, blocks, self.output_attn_res_norm, self.output_attn_res_proj, self.norm)
        normed: Tensor = self.norm(h)
        return normed
