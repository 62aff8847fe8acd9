"""The one-token pass computes what the general pass computes: for any batch, any weights' dtype, any configuration."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import checkpoint, ids, mini_config
from comparison import CLEAR_ROUTING, assert_close, both_ways, load
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import kda_recurrence_f64, oracle_run
from strategies import REPEATABLE, model_configs

from kimik3_cli.engine.cache import DecodeCache
from kimik3_cli.engine.checkpoint.load import parameter_dtype
from kimik3_cli.engine.kda.decode import KdaConstants, kda_decode
from kimik3_cli.engine.model.decoder import KimiK3
from kimik3_cli.engine.model.step import DecodeStep
from kimik3_cli.errors import RequestError


def model_of(config: dict[str, Any], folder: Path, seed: int = 0) -> KimiK3:
    torch.save(checkpoint(config, seed), folder / "model.pt")
    return load(folder / "model.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("step")


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_any_batch(batch: int, tmp_path: Path) -> None:
    rows = torch.tensor([ids(12, seed=seed) for seed in range(batch)])
    assert_close(*both_ways(model_of(mini_config(), tmp_path), rows, prefix=4), 5e-5)


@settings(REPEATABLE, max_examples=30)
@given(config=model_configs(), batch=st.integers(1, 3), prefix=st.integers(1, 20), seed=st.integers(0, 99))
def test_any_configuration(config: dict[str, Any], batch: int, prefix: int, seed: int, folder: Path) -> None:
    rows = [ids(prefix + 3, config["vocab_size"], seed + row) for row in range(batch)]
    made = checkpoint(config, seed)
    assume(all(oracle_run(made, row).routing_gap > CLEAR_ROUTING for row in rows))
    torch.save(made, folder / "model.pt")
    assert_close(*both_ways(load(folder / "model.pt"), torch.tensor(rows), prefix))


def test_bf16_weights_keep_sums_and_state_in_float32(tmp_path: Path) -> None:
    model = model_of(mini_config(), tmp_path)
    exact, _ = both_ways(model, torch.tensor([ids(12)]), prefix=4)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(parameter_dtype(name, tuple(parameter.shape), "bf16"))
    cache = DecodeCache(model.config, 1, 12)
    step = DecodeStep(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        rounded = torch.stack([step.hidden(torch.tensor([token]), cache).clone() for token in ids(12)], dim=1)[:, 4:]
    assert rounded.dtype == torch.float32
    assert all(
        tensor.dtype == torch.float32
        for state in cache.states
        for tensor in vars(state).values()
        if tensor is not None and isinstance(tensor, torch.Tensor)
    )
    assert_close(rounded, exact, 0.2)
    assert not torch.equal(rounded, exact)


def test_a_full_cache_refuses_the_next_token(tmp_path: Path) -> None:
    model = model_of(mini_config(), tmp_path)
    cache = DecodeCache(model.config, 1, 3)
    with torch.no_grad():
        model.hidden(torch.tensor([[1, 2, 3]]), cache)
        with pytest.raises(RequestError, match="1 more tokens after 3 do not fit a cache made for 3"):
            DecodeStep(model)(torch.tensor([4]), cache)
    assert cache.length == 3


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize(("batch", "heads", "size"), [(1, 2, 16), (3, 1, 24), (2, 3, 60)])
def test_the_kernel_against_the_float64_recurrence(
    lower_bound: float | None, batch: int, heads: int, size: int
) -> None:
    """Long run, slow and fast gates: outputs and state to 1e-5 of a float64 run on the same inputs."""
    generator = torch.Generator().manual_seed(7)
    steps, width = 200, heads * size
    qkv = torch.randn(steps, batch, 3 * width, generator=generator)
    z = 4 * torch.randn(steps, batch, heads, size, generator=generator) - 4
    beta, gate = (
        torch.randn(steps, batch, heads, generator=generator),
        torch.randn(steps, *z.shape[1:], generator=generator),
    )
    a_log, norm = torch.rand(heads, generator=generator), 1 + torch.rand(size, generator=generator)
    constants = KdaConstants(
        taps=torch.tensor([[0.0], [1.0]]).expand(2, 3 * width),  # the newest input alone
        a_log=a_log,
        lower_bound=lower_bound,
        out_weight=norm * size**0.5,
        out_floor=size * 1e-5**0.5,
    )
    tail, memory = torch.zeros(batch, 1, 3 * width), torch.zeros(batch, heads, size, size)
    outputs = [kda_decode(*each, constants, tail, memory) for each in zip(qkv, z, beta, gate, strict=True)]

    mixed = torch.nn.functional.silu(qkv.double()).view(steps, batch, 3, heads, size)
    q, k, v = mixed.permute(2, 1, 0, 3, 4)  # [B,T,H,K]
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    rate, z64 = a_log.double().exp()[:, None], z.double().transpose(0, 1)
    bounded = lower_bound is not None
    g = lower_bound * torch.sigmoid(rate * z64) if bounded else -rate * torch.nn.functional.softplus(z64)
    strength = torch.sigmoid(beta.double()).transpose(0, 1)
    o, state = kda_recurrence_f64(q * size**-0.5, k, v, g, strength, torch.zeros_like(memory, dtype=torch.float64))
    normed = o * (o.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm
    expected = (normed * torch.sigmoid(gate.double().transpose(0, 1))).transpose(0, 1)
    assert_close(torch.stack(outputs), expected, 1e-5)
    assert_close(memory, state, 1e-5)
    assert torch.equal(tail[:, 0], qkv[-1])
