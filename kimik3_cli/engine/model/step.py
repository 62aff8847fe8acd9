"""The whole network for one token of every sequence: what decoding repeats.

`KimiK3.hidden` with a cache computes the same for any number of tokens; this pass is prepared once a request and makes
few and cheap calls, because for small models calls cost more than arithmetic. Tests hold the two together.

Letters: B sequences, D hidden size, V vocabulary.
"""

from collections.abc import Callable
from typing import cast

from torch import Tensor

from kimik3_cli.engine.cache import DecodeCache, KdaState, MlaState
from kimik3_cli.engine.model.decoder import DecoderLayer, KimiK3
from kimik3_cli.engine.model.kda import KdaAttention
from kimik3_cli.engine.model.parts import without_autocast
from kimik3_cli.engine.model.step_attention import KdaStep, MlaStep
from kimik3_cli.engine.model.step_ffn import DenseStep, MoeStep
from kimik3_cli.engine.model.step_parts import MixedNormStep, NormStep, Projections


class LayerStep:
    """What `DecoderLayer` computes for one token."""

    def __init__(self, layer: DecoderLayer, batch: int) -> None:
        """Prepare attention, feed-forward, norms and mixing."""
        attention = layer.self_attn
        self.attention: KdaStep | MlaStep = (
            KdaStep(attention, batch) if isinstance(attention, KdaAttention) else MlaStep(attention, batch)
        )
        self.ffn = MoeStep(layer.block_sparse_moe, batch) if layer.is_moe else DenseStep(layer.mlp, batch)
        norms = layer.input_layernorm, layer.post_attention_layernorm
        self.mixes_residuals = layer.mixes_residuals
        if layer.mixes_residuals:
            mix = layer.self_attention_res_norm, layer.self_attention_res_proj
            self.attention_mix = MixedNormStep(*mix, norms[0], batch)
            self.ffn_mix = MixedNormStep(layer.mlp_res_norm, layer.mlp_res_proj, norms[1], batch)
            self.starts_block = layer.starts_block
        else:
            self.attention_norm, self.ffn_norm = (NormStep(norm, batch) for norm in norms)

    def __call__(self, h: Tensor, blocks: list[Tensor], state: KdaState | MlaState) -> Tensor:
        """Advance the running sum h [B,D] and the state; a finished block is added to `blocks`."""
        if not self.mixes_residuals:
            h = self.attention(self.attention_norm(h), state, h)  # type: ignore[arg-type]
            return self.ffn(self.ffn_norm(h), h)
        x = self.attention_mix(h, blocks)
        total: Tensor | None = h
        if self.starts_block:
            blocks.append(h)
            total = None
        h = self.attention(x, state, total)  # type: ignore[arg-type]
        return self.ffn(self.ffn_mix(h, blocks), h)


class DecodeStep:
    """One token of B sequences through a model, prepared for a request."""

    def __init__(self, model: KimiK3, batch: int = 1) -> None:
        """Prepare for `batch` sequences; nothing of the weights is copied but norms and convolution taps."""
        self.embedding = model.embed_tokens.weight
        self.layers = [LayerStep(layer, batch) for layer in cast(list[DecoderLayer], list(model.layers))]
        if model.config.attn_res_block_size is not None:
            mix = model.output_attn_res_norm, model.output_attn_res_proj
            self.output: Callable[[Tensor, list[Tensor]], Tensor] = MixedNormStep(*mix, model.norm, batch)
        else:
            norm = NormStep(model.norm, batch)
            self.output = lambda h, _: norm(h)
        self.head = Projections([model.lm_head.weight], batch)

    def __call__(self, ids: Tensor, cache: DecodeCache) -> Tensor:
        """Logits of the tokens after: [B] int64 -> [B,V] float32; raises and advances as `hidden` does."""
        hidden = self.hidden(ids, cache)
        with without_autocast(hidden.device):
            return self.head(hidden).clone()  # its buffer is the next token's

    def hidden(self, ids: Tensor, cache: DecodeCache) -> Tensor:
        """Final normed hidden states: [B] int64 -> [B,D] float32, valid until the next call; the cache is advanced.

        Raises:
            RequestError: the token does not fit the cache.
        """
        cache.reserve(1)
        h = self.embedding[ids].float()  # [B,D]
        blocks: list[Tensor] = []
        with without_autocast(h.device):
            for layer, state in zip(self.layers, cache.states, strict=True):
                h = layer(h, blocks, state)
            return self.output(h, blocks)
