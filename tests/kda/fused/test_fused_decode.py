"""The fused decode step equals a float64 step and `kda_decode`, in place, for any size, batch and kernel width."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from guarded import assert_guards, between_guards
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import kda_recurrence_f64, rms_norm
from strategies import REPEATABLE
from torch import Tensor
from torch.nn.functional import silu, softplus

from kimik3_cli.engine.kda.decode import KdaConstants, kda_decode
from kimik3_cli.engine.kda.fused.decode import kda_decode_fused

BOUND = 2e-5
EPS = 1e-5


class Layer(NamedTuple):
    constants: KdaConstants
    norm: Tensor
    tail: Tensor
    memory: Tensor


class Token(NamedTuple):
    qkv: Tensor
    z: Tensor
    beta: Tensor
    gate: Tensor


def make_layer(batch: int, heads: int, size: int, kernel: int, lower_bound: float | None) -> Layer:
    generator = torch.Generator().manual_seed(size + kernel)
    width = 3 * heads * size
    norm = 1 + torch.rand(size, generator=generator)
    taps, a_log = torch.randn(kernel, width, generator=generator), torch.rand(heads, generator=generator)
    constants = KdaConstants(
        taps=taps,
        a_log=a_log,
        lower_bound=lower_bound,
        out_weight=norm * size**0.5,
        out_floor=size * EPS**0.5,
    )
    tail = torch.randn(batch, kernel - 1, width, generator=generator)
    return Layer(constants, norm, tail, torch.randn(batch, heads, size, size, generator=generator))


def make_token(batch: int, heads: int, size: int, seed: int, z_scale: float = 4.0) -> Token:
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(batch, 3 * heads * size, generator=generator)
    z, gate = (torch.randn(batch, heads, size, generator=generator) for _ in range(2))
    return Token(qkv, z_scale * z - 2, torch.randn(batch, heads, generator=generator), gate)


def in_float64(layer: Layer, token: Token) -> tuple[Tensor, Tensor, Tensor]:
    """Output, next tail and next memory of one token."""
    batch, heads, size = token.z.shape
    window = torch.cat([layer.tail, token.qkv[:, None]], dim=1).double()
    mixed = silu((window * layer.constants.taps.double()).sum(1)).view(batch, 3, 1, heads, size)  # one token
    q, k, v = mixed.unbind(1)  # [B,1,H,K]
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    rate, z = layer.constants.a_log.double().exp()[:, None], token.z.double()
    bound = layer.constants.lower_bound
    g = -rate * softplus(z) if bound is None else bound * torch.sigmoid(rate * z)
    strength = torch.sigmoid(token.beta.double())
    o, memory = kda_recurrence_f64(q * size**-0.5, k, v, g[:, None], strength[:, None], layer.memory)
    y = rms_norm(o[:, 0], layer.norm.double(), EPS) * torch.sigmoid(token.gate.double())
    return y, window[:, 1:], memory


def assert_close(actual: Tensor, expected: Tensor, bound: float = BOUND) -> None:
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    error = (actual.double() - expected).abs().max() / expected.abs().max()
    assert error <= bound, f"relative error {error:.2e}"


def assert_step(layer: Layer, token: Token) -> None:
    """One fused step is exact and advances tail and memory in place."""
    y, tail, memory = in_float64(layer, token)
    assert_close(kda_decode_fused(*token, layer.constants, layer.tail, layer.memory), y)
    assert torch.equal(layer.tail.double(), tail)
    assert_close(layer.memory, memory)


@pytest.mark.parametrize("lower_bound", [-5.0, -60.0, None])
@pytest.mark.parametrize("size", [16, 17, 24, 60, 96, 100, 128, 255, 256])
def test_sizes_between_guards(size: int, lower_bound: float | None) -> None:
    layer, token = make_layer(1, 2, size, 4, lower_bound), make_token(1, 2, size, seed=1)
    tensors = {name: between_guards(x) for name, x in vars(layer.constants).items() if name in GUARDED}
    layer = Layer(
        replace(layer.constants, **tensors), layer.norm, between_guards(layer.tail), between_guards(layer.memory)
    )
    token = Token(*(between_guards(x) for x in token))
    assert_step(layer, token)
    for operand in (*tensors.values(), layer.tail, layer.memory, *token):
        assert_guards(operand)


GUARDED = ("taps", "a_log", "out_weight")


@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 5, 6, 9, 12])
def test_kernel_widths(kernel: int) -> None:
    layer = make_layer(2, 2, 16, kernel, -5.0)
    for seed in range(3):
        assert_step(layer, make_token(2, 2, 16, seed))


def test_as_the_chunkwise_path_does() -> None:
    """Many steps of either, each on a state of its own."""
    ours, theirs = (make_layer(2, 1, 24, 4, None) for _ in range(2))
    for seed in range(20):
        token = make_token(2, 1, 24, seed)
        y = kda_decode_fused(*token, ours.constants, ours.tail, ours.memory)
        assert_close(y, kda_decode(*token, theirs.constants, theirs.tail, theirs.memory).double())
    assert torch.equal(ours.tail, theirs.tail)
    assert_close(ours.memory, theirs.memory.double())


def test_slow_decay_keeps_its_precision() -> None:
    """128 steps of a decay of 0.99992: where the decay itself is rounded, by up to 2^-25, all errors add up."""
    layer = make_layer(1, 1, 16, 1, None)
    expected = layer.memory.double()
    z, quiet = torch.full((1, 1, 16), -9.4334), torch.full((1, 1), -200.0)
    for seed in range(128):
        token = make_token(1, 1, 16, seed)._replace(z=z, beta=quiet)
        kda_decode_fused(*token, replace(layer.constants, a_log=torch.zeros(1)), layer.tail, layer.memory)
        expected = expected * (-softplus(z.double())).exp()[..., None]
    assert_close(layer.memory, expected, 5e-7)


@settings(REPEATABLE, max_examples=20)
@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    size=st.integers(16, 70),
    kernel=st.integers(1, 6),
    lower_bound=st.sampled_from([None, -5.0, -60.0]),
    z_scale=st.sampled_from([0.0, 1.0, 100.0]),
    seed=st.integers(0, 1000),
)
def test_any_shape(
    batch: int, heads: int, size: int, kernel: int, lower_bound: float | None, z_scale: float, seed: int
) -> None:
    assert_step(make_layer(batch, heads, size, kernel, lower_bound), make_token(batch, heads, size, seed, z_scale))


@pytest.mark.parametrize("rounded", [("qkv", "z", "beta", "gate"), ("z",), ("qkv", "gate")])
def test_bfloat16_inputs(rounded: tuple[str, ...]) -> None:
    token = make_token(2, 2, 16, seed=1)
    token = token._replace(**{name: getattr(token, name).bfloat16() for name in rounded})
    assert_step(make_layer(2, 2, 16, 4, -5.0), token)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("operand", ["qkv", "z", "beta", "gate", "taps", "a_log", "out_weight", "tail", "memory"])
def test_what_is_not_finite_shows(operand: str, lower_bound: float | None) -> None:
    layer, token = make_layer(1, 1, 16, 4, lower_bound), make_token(1, 1, 16, seed=1)
    operands = {**token._asdict(), **vars(layer.constants), "tail": layer.tail, "memory": layer.memory}
    operands[operand].view(-1)[0] = torch.nan
    assert kda_decode_fused(*token, layer.constants, layer.tail, layer.memory).isnan().any()


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("a_log", [20.0, 88.5, 100.0])
def test_rates_that_float32_hardly_holds(a_log: float, lower_bound: float | None) -> None:
    layer, token = make_layer(1, 1, 16, 4, lower_bound), make_token(1, 1, 16, seed=1)
    token.z[..., :4] = 0.0  # times an infinite rate it would not be a number
    assert_step(layer._replace(constants=replace(layer.constants, a_log=torch.full((1,), a_log))), token)


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e-3, 1e-2])
def test_keys_of_hardly_any_length(scale: float) -> None:
    """The 1e-6 under the root of the normalisation decides here."""
    layer, token = make_layer(1, 1, 16, 1, -5.0), make_token(1, 1, 16, seed=1)
    token.qkv[:, 16:32] *= scale
    token.qkv[:, :16] *= max(scale, 1e-4)
    assert_step(layer, token)
