"""Inputs of the KDA kernels as a layer makes them, with gates and keys of hard ranges."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def part(self, start: int, stop: int) -> "Inputs":
        return Inputs(*(x[:, start:stop] for x in self))

    def rows(self, start: int, stop: int) -> "Inputs":
        return Inputs(*(x[start:stop] for x in self))


# From uniform noise in [0, 1) of the shape [B,T,H,K] to log decays.
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "anywhere above -5": lambda noise: -5 * noise,
    "all -5": lambda noise: torch.full_like(noise, -5.0),
    "all zero": torch.zeros_like,
    "all near zero": lambda noise: -1e-6 * noise,
    "anywhere above -60": lambda noise: -60 * noise,
    "all -60": lambda noise: torch.full_like(noise, -60.0),
    "mixed anywhere": lambda noise: torch.where(noise < 0.2, -60.0, -1e-4),
    "mixed tokens": lambda noise: torch.where(noise[..., :1, :1] < 0.2, -60.0, -1e-4).expand_as(noise),
    "mixed channels": lambda noise: torch.where(noise[:, :1] < 0.5, -60.0, -1e-4).expand_as(noise),
}
# From one random key a token [B,T,H,K] to the keys, before they are normalised.
KEYS: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda keys: keys,
    "all equal": lambda keys: keys[:, :1].expand_as(keys),
    "nearly equal": lambda keys: keys[:, :1] + 1e-3 * keys,
}


def make(
    length: int,
    gates: str = "anywhere above -5",
    keys: str = "random",
    *,
    batch: int = 1,
    heads: int = 2,
    sizes: tuple[int, int] = (8, 12),
    seed: int = 0,
) -> Inputs:
    """Kernel inputs as a layer makes them; `sizes` is (K, V). Correlated keys come with beta close to 1."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, length, heads, sizes[0])
    q, k = (torch.randn(shape, generator=generator) for _ in range(2))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, KEYS[keys](k)))
    v = torch.randn(batch, length, heads, sizes[1], generator=generator)
    beta = torch.rand(batch, length, heads, generator=generator)
    beta = beta if keys == "random" else 1 - 1e-4 * beta
    return Inputs(q * sizes[0] ** -0.5, k, v, GATES[gates](torch.rand(shape, generator=generator)), beta)


def random_state(inputs: Inputs, seed: int = 7) -> Tensor:
    batch, _, heads, key_size = inputs.k.shape
    shape = (batch, heads, key_size, inputs.v.shape[-1])
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
