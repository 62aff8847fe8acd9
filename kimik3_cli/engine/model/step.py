"""The whole network for one token of every sequence: what decoding repeats.

`KimiK3.hidden` with a cache computes the same for any number of tokens; this pass is prepared once a request and makes
few and cheap calls, because for small models calls cost more than arithmetic. Tests hold the two together.

Letters: B sequences, D hidden size, N sources of a residual mix.
"""

from typing import cast

import torch
from torch import Tensor, nn

from kimik3_cli.engine.cache import DecodeCache, KdaState, MlaState
from kimik3_cli.engine.model.decoder import DecoderLayer, KimiK3
from kimik3_cli.engine.model.kda import KdaAttention
from kimik3_cli.engine.model.parts import RMSNorm, without_autocast
from kimik3_cli.engine.model.step_attention import KdaStep, MlaStep
from kimik3_cli.engine.model.step_ffn import DenseStep, MoeStep
from kimik3_cli.engine.model.step_parts import NormStep


class MixStep:
    """What `mix_residuals` computes for one token."""

    def __init__(self, norm: RMSNorm, proj: nn.Linear) -> None:
        """Prepare the query."""
        self.norm = NormStep(norm)
        self.query = self.norm.weight * proj.weight[0].float()  # [D]

    def __call__(self, h: Tensor, blocks: list[Tensor]) -> Tensor:
        """Mix h [B,D] with the finished blocks, each [B,D]."""
        if not blocks:
            return h
        values = torch.stack([*blocks, h], dim=1)  # [B,N,D]
        weights = torch.softmax(self.norm.unit(values) @ self.query, dim=-1)  # [B,N]
        return torch.bmm(weights.unsqueeze(1), values).squeeze(1)


class LayerStep:
    """What `DecoderLayer` computes for one token."""

    def __init__(self, layer: DecoderLayer) -> None:
        """Prepare attention, feed-forward, norms and mixing."""
        attention = layer.self_attn
        self.attention: KdaStep | MlaStep = (
            KdaStep(attention) if isinstance(attention, KdaAttention) else MlaStep(attention)
        )
        self.ffn = MoeStep(layer.block_sparse_moe) if layer.is_moe else DenseStep(layer.mlp)
        self.attention_norm, self.ffn_norm = NormStep(layer.input_layernorm), NormStep(layer.post_attention_layernorm)
        self.mixes_residuals = layer.mixes_residuals
        if layer.mixes_residuals:
            self.attention_mix = MixStep(layer.self_attention_res_norm, layer.self_attention_res_proj)
            self.ffn_mix = MixStep(layer.mlp_res_norm, layer.mlp_res_proj)
            self.starts_block = layer.starts_block

    def __call__(self, h: Tensor, blocks: list[Tensor], state: KdaState | MlaState) -> Tensor:
        """Advance the running sum h [B,D] and the state; a finished block is added to `blocks`."""
        if not self.mixes_residuals:
            h = self.attention(self.attention_norm(h), state, h)  # type: ignore[arg-type]
            return self.ffn(self.ffn_norm(h), h)
        mixed = self.attention_mix(h, blocks)
        total: Tensor | None = h
        if self.starts_block:
            blocks.append(h)
            total = None
        h = self.attention(self.attention_norm(mixed), state, total)  # type: ignore[arg-type]
        return self.ffn(self.ffn_norm(self.ffn_mix(h, blocks)), h)


class DecodeStep:
    """One token of B sequences through a model, prepared for a request."""

    def __init__(self, model: KimiK3) -> None:
        """Prepare; nothing of the weights is copied but norms and convolution taps."""
        self.embedding = model.embed_tokens.weight
        self.layers = [LayerStep(layer) for layer in cast(list[DecoderLayer], list(model.layers))]
        mixes = model.config.attn_res_block_size is not None
        self.mix = MixStep(model.output_attn_res_norm, model.output_attn_res_proj) if mixes else None
        self.norm = NormStep(model.norm)

    def __call__(self, ids: Tensor, cache: DecodeCache) -> Tensor:
        """Final normed hidden states: [B] int64 -> [B,D] float32; the cache is advanced by one token.

        Raises:
            RequestError: the token does not fit the cache.
        """
        cache.reserve(1)
        h = self.embedding[ids].float()  # [B,D]
        blocks: list[Tensor] = []
        with without_autocast(h.device):
            for layer, state in zip(self.layers, cache.states, strict=True):
                h = layer(h, blocks, state)
            return self.norm(h if self.mix is None else self.mix(h, blocks))
