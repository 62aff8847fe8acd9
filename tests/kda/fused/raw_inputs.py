"""Inputs of the fused prefill as a layer makes them, before gates and norms, and their float64 result."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from oracle import kda_recurrence_f64
from torch import Tensor

from kimik3_cli.engine.kda.fused.prefill import kda_fused

BOUND = 2e-5


class Raw(NamedTuple):
    """The arguments of `kda_fused`."""

    q: Tensor
    k: Tensor
    v: Tensor
    z: Tensor
    beta_logits: Tensor
    a_log: Tensor
    dt_bias: Tensor
    initial_state: Tensor | None
    lower_bound: float | None

    def part(self, start: int, stop: int, state: Tensor | None) -> "Raw":
        """Tokens start to stop, entered with `state`."""
        over_time = (x[:, start:stop] for x in self[:5])
        return Raw(*over_time, self.a_log, self.dt_bias, state, self.lower_bound)

    def activations(self, change: Callable[[Tensor], Tensor]) -> "Raw":
        """The same with q, k, v, z and beta_logits changed."""
        return Raw(*(change(x) for x in self[:5]), *self[5:])


# Name -> lower bound and, from uniform noise in [0,1) of the shape [B,T,H,K], z with a rate of 1 and no bias.
GATES: dict[str, tuple[float | None, Callable[[Tensor], Tensor]]] = {
    "bounded, anywhere": (-5.0, lambda noise: 12 * noise - 6),
    "bounded, all -5": (-5.0, lambda noise: torch.full_like(noise, 60.0)),
    "bounded, all zero": (-5.0, lambda noise: torch.full_like(noise, -300.0)),
    "bounded, near zero": (-5.0, lambda noise: -14 - noise),
    "bounded, anywhere above -60": (-60.0, lambda noise: 12 * noise - 6),
    "softplus, anywhere": (None, lambda noise: 12 * noise - 8),
    "softplus, all -100": (None, lambda noise: torch.full_like(noise, 100.0)),
    "softplus, near zero": (None, lambda noise: -14 - noise),
    "mixed anywhere": (None, lambda noise: torch.where(noise < 0.2, 60.0, -9.0)),
    "mixed tokens": (None, lambda noise: torch.where(noise[..., :1, :1] < 0.2, 60.0, -9.0).expand_as(noise)),
    "mixed channels": (-60.0, lambda noise: torch.where(noise[:, :1] < 0.5, 20.0, -20.0).expand_as(noise)),
}
# From one random key a token [B,T,H,K] to the keys.
KEYS: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda keys: keys,
    "all equal": lambda keys: keys[:, :1].expand_as(keys).contiguous(),
    "nearly equal": lambda keys: keys[:, :1] + 1e-3 * keys,
}


def make(
    length: int,
    gates: str = "bounded, anywhere",
    keys: str = "random",
    *,
    batch: int = 1,
    heads: int = 1,
    sizes: tuple[int, int] = (16, 16),
    has_state: bool = True,
    seed: int = 0,
) -> Raw:
    """Random inputs; `sizes` is (K, V). Correlated keys come with beta close to 1."""
    generator = torch.Generator().manual_seed(seed)
    (key_size, value_size), (lower_bound, z_of) = sizes, GATES[gates]
    shape = (batch, length, heads, key_size)
    q, k = (torch.randn(shape, generator=generator) for _ in range(2))
    v = torch.randn(batch, length, heads, value_size, generator=generator)
    logits = torch.randn(batch, length, heads, generator=generator)
    a_log, dt_bias = torch.rand(heads, generator=generator), torch.randn(heads * key_size, generator=generator)
    z = (z_of(torch.rand(shape, generator=generator)) - dt_bias.view(heads, key_size)) / a_log.exp()[:, None]
    if z.abs().max() > 50:  # the extremes stay extreme
        a_log, dt_bias = torch.zeros(heads), torch.zeros(heads * key_size)
        z = z_of(torch.rand(shape, generator=generator))
    state = torch.randn(batch, heads, key_size, value_size, generator=generator) if has_state else None
    return Raw(q, KEYS[keys](k), v, z, logits if keys == "random" else 9 + logits, a_log, dt_bias, state, lower_bound)


def in_float64(raw: Raw) -> tuple[Tensor, Tensor]:
    """Outputs and final state, from the formulas and the recurrence in float64."""
    q, k, v, z, logits, a_log, dt_bias = (x.double() for x in raw[:7])
    heads, key_size = k.shape[-2:]
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    rate, z = a_log.exp()[:, None], z + dt_bias.view(heads, key_size)
    if raw.lower_bound is None:
        g = -rate * torch.logaddexp(z, torch.zeros_like(z))
    else:
        g = raw.lower_bound * torch.sigmoid(rate * z)
    return kda_recurrence_f64(q * key_size**-0.5, k, v, g, torch.sigmoid(logits), raw.initial_state)


def relative_errors(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> list[float]:
    """max|difference| / max|expected| of outputs and state, which must be finite."""
    errors = []
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        assert a.dtype == torch.float32
        assert a.isfinite().all()
        errors.append(((a.double() - e).abs().max() / e.abs().max()).item())
    return errors


def assert_exact(raw: Raw, bound: float = BOUND) -> None:
    """`kda_fused` equals float64 on these inputs."""
    errors = relative_errors(kda_fused(*raw), in_float64(raw))
    assert max(errors) <= bound, f"relative errors {errors}"
