"""What decoding carries from token to token: one state a layer.

Letters: B batch, H heads, K head size (keys and values alike), c convolution kernel, L maximum length, R latent width.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class KdaState:
    """State of one KDA layer: `memory` [B,H,K,K] float32; `tail` [B,c-1,3*H*K], the last inputs of the convolutions."""

    memory: Tensor
    tail: Tensor


@dataclass
class MlaState:
    """State of one full-attention layer: `latent` [B,L,R] holds the normed latent and the shared key of each token."""

    latent: Tensor
    length: int = 0

    def append(self, latent: Tensor) -> Tensor:
        """Add [B,T,R] and return everything so far, [B,length,R]."""
        end = self.length + latent.shape[1]
        self.latent[:, self.length : end] = latent
        self.length = end
        return self.latent[:, :end]
