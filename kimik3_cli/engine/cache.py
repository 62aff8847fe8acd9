"""What decoding carries from token to token: one state a layer, allocated once for a whole request.

Letters: B batch, H heads, K head size (keys and values alike), c convolution kernel, L maximum length, C latent width,
R width of the shared key slice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kimik3_cli.engine.config import KimiK3Config
from kimik3_cli.errors import RequestError


@dataclass
class KdaState:
    """State of one KDA layer, float32.

    memory: [B,H,K,K], keys by values.
    tail: [B,c-1,3*H*K], the last inputs of the q, k and v convolutions, oldest first.
    """

    memory: Tensor
    tail: Tensor


@dataclass
class MlaState:
    """State of one full-attention layer: `latent` [B,L,C+R] float32, the normed latents and the shared key slices."""

    latent: Tensor
    length: int = 0

    def append(self, latent: Tensor) -> Tensor:
        """Add the rows of T tokens, [B,T,C+R], and return those of all tokens so far, [B,length,C+R]."""
        end = self.length + latent.shape[1]
        self.latent[:, self.length : end] = latent
        self.length = end
        return self.latent[:, :end]


class DecodeCache:
    """The states of all layers for B sequences of one request; never shared between requests."""

    def __init__(self, config: KimiK3Config, batch: int, max_length: int, device: torch.device | str = "cpu") -> None:
        """Allocate everything: B * (config.cache_bytes_fixed() + max_length * config.cache_bytes_per_token()) bytes."""
        linear_attn = config.linear_attn_config
        heads, size = linear_attn.num_heads, linear_attn.head_dim
        tail_length = linear_attn.short_conv_kernel_size - 1
        latent_width = (config.kv_lora_rank or 0) + (config.qk_rope_head_dim or 0)

        def new_state(layer: int) -> KdaState | MlaState:
            if not config.is_kda(layer):
                return MlaState(torch.zeros(batch, max_length, latent_width, device=device))
            return KdaState(
                memory=torch.zeros(batch, heads, size, size, device=device),
                tail=torch.zeros(batch, tail_length, 3 * heads * size, device=device),
            )

        # the one-token pass, prepared when first needed
        self.step: Callable[[Tensor, DecodeCache], Tensor] | None = None
        self.states = [new_state(layer) for layer in range(config.num_hidden_layers)]
        self.max_length = max_length
        self.length = 0

    def reserve(self, new_tokens: int) -> None:
        """Count `new_tokens` more tokens before they are computed.

        Raises:
            RequestError: they do not fit.
        """
        if self.length + new_tokens > self.max_length:
            raise RequestError(
                f"{new_tokens} more tokens after {self.length} do not fit a cache made for {self.max_length}"
            )
        self.length += new_tokens

    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(
            state.latent.nbytes if isinstance(state, MlaState) else state.memory.nbytes + state.tail.nbytes
            for state in self.states
        )
