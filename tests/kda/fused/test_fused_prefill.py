"""The laws of the fused prefill: it equals the float64 recurrence, wherever gates, keys, lengths and sizes lie."""

from itertools import pairwise

import pytest
import torch
from guarded import assert_guards, between_guards
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_inputs import BOUND, GATES, KEYS, Raw, assert_exact, in_float64, make, relative_errors
from strategies import REPEATABLE

from kimik3_cli.engine.kda.fused.prefill import kda_fused

ODD_SIZES = [(24, 60), (60, 24), (96, 100), (100, 96), (17, 255), (255, 17), (256, 16), (16, 256), (128, 128)]


def test_every_length() -> None:
    raw = make(33, "mixed anywhere")
    for length in range(1, 34):
        assert_exact(raw.part(0, length, raw.initial_state))


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("gates", GATES)
def test_gates_and_keys(gates: str, keys: str) -> None:
    assert_exact(make(21, gates, keys))


@pytest.mark.parametrize("keys", ["all equal", "nearly equal"])
def test_correlated_keys_that_are_never_forgotten(keys: str) -> None:
    assert_exact(make(100, "softplus, near zero", keys))


@pytest.mark.parametrize("position", [0, 1, 15, 16, 31])
def test_one_deep_gate_beside_channels_that_never_forget(position: int) -> None:
    raw = make(33, "softplus, near zero")
    raw.z[:, position, :, ::2] = 100.0
    assert_exact(raw)


@pytest.mark.parametrize("value", [-120.0, 120.0])
def test_beta_at_its_limits(value: float) -> None:
    assert_exact(make(20)._replace(beta_logits=torch.full((1, 20, 1), value)))


@pytest.mark.parametrize("gates", ["bounded, anywhere", "softplus, anywhere"])
@pytest.mark.parametrize("sizes", ODD_SIZES)
def test_sizes_between_guards(sizes: tuple[int, int], gates: str) -> None:
    """Nothing outside an operand is read or written, whatever the size of a head."""
    raw = make(17, gates, sizes=sizes)
    guarded = Raw(*(between_guards(x) if isinstance(x, torch.Tensor) else x for x in raw))
    assert_exact(guarded)
    for operand, before in zip(guarded[:8], raw[:8], strict=True):
        assert_guards(operand)
        assert torch.equal(operand, before)


def test_batch_and_heads() -> None:
    assert_exact(make(18, "mixed anywhere", batch=2, heads=3, sizes=(16, 24)))


def test_rows_of_a_batch_do_not_see_each_other() -> None:
    raw = make(18, "mixed anywhere", batch=2, heads=2)
    together, states = kda_fused(*raw)
    alone = Raw(*(x[1:] for x in raw[:5]), raw.a_log, raw.dt_bias, raw.initial_state[1:], raw.lower_bound)
    output, state = kda_fused(*alone)
    assert torch.equal(output, together[1:])
    assert torch.equal(state, states[1:])


def test_slices_of_a_wider_projection_and_other_memory_orders() -> None:
    raw = make(18, batch=2, heads=2, sizes=(16, 16))
    side_by_side = torch.cat([x.flatten(2) for x in raw[:4]], dim=-1)  # [B,T,4*H*K]
    sliced = [part.unflatten(-1, (2, 16)) for part in side_by_side.chunk(4, dim=-1)]
    head_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in raw[:5]]
    expected, expected_state = kda_fused(*raw)
    for q, k, v, z, logits in ([*sliced, raw.beta_logits], head_first):
        assert not k.is_contiguous()
        output, state = kda_fused(q, k, v, z, logits, *raw[5:])
        assert torch.equal(output, expected)
        assert torch.equal(state, expected_state)


def test_without_a_state() -> None:
    raw = make(20, has_state=False)
    assert_exact(raw)
    output, _ = kda_fused(*raw)
    zeros, _ = kda_fused(*raw._replace(initial_state=torch.zeros(1, 1, 16, 16)))
    assert torch.equal(output, zeros)


@pytest.mark.parametrize("cuts", [[1], [7], [15], [16], [17], [31], [32], [33], [1, 2, 3], [16, 20, 36]])
def test_splitting_changes_nothing(cuts: list[int]) -> None:
    raw = make(40, "mixed anywhere")
    outputs, state = [], raw.initial_state
    for start, stop in pairwise([0, *cuts, 40]):
        output, state = kda_fused(*raw.part(start, stop, state))
        outputs.append(output)
    assert state is not None
    assert max(relative_errors((torch.cat(outputs, dim=1), state), in_float64(raw))) <= BOUND


def test_earlier_outputs_do_not_see_later_tokens() -> None:
    raw, noise = make(33), make(33, "bounded, anywhere above -60", seed=1)
    before, _ = kda_fused(*raw)
    for length in (1, 15, 16, 20):
        changed = (torch.cat([x[:, :length], y[:, length:]], dim=1) for x, y in zip(raw[:5], noise[:5], strict=True))
        after, _ = kda_fused(*changed, *raw[5:])
        assert torch.equal(after[:, :length], before[:, :length])


@settings(REPEATABLE, max_examples=15)
@given(
    length=st.integers(1, 36),
    gates=st.sampled_from(sorted(GATES)),
    keys=st.sampled_from(sorted(KEYS)),
    sizes=st.tuples(st.integers(16, 80), st.integers(16, 80)),
    batch=st.integers(1, 2),
    heads=st.integers(1, 2),
    has_state=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape(
    length: int,
    gates: str,
    keys: str,
    sizes: tuple[int, int],
    batch: int,
    heads: int,
    has_state: bool,
    seed: int,
) -> None:
    assert_exact(make(length, gates, keys, batch=batch, heads=heads, sizes=sizes, has_state=has_state, seed=seed))


@pytest.mark.parametrize("gates", ["bounded, anywhere", "softplus, anywhere"])
def test_bfloat16_inputs(gates: str) -> None:
    """Only the inputs are rounded: on the same rounded inputs the result is as exact as with float32 ones."""
    assert_exact(make(20, gates, sizes=(32, 24)).activations(torch.Tensor.bfloat16))


def test_a_mixture_of_dtypes_is_read_in_float32() -> None:
    raw = make(20)
    assert_exact(raw._replace(z=raw.z.bfloat16(), v=raw.v.bfloat16(), a_log=raw.a_log.bfloat16()))


@pytest.mark.parametrize(("dtype", "bound", "length"), [(torch.float32, 1e-5, 2048), (torch.bfloat16, 1e-3, 1024)])
def test_slow_decay_keeps_its_precision(dtype: torch.dtype, bound: float, length: int) -> None:
    """A decay of 0.99992 rounds to 1 in bfloat16; over thousands of steps that is a state of another size."""
    raw = make(length, "softplus, near zero")
    z = torch.full_like(raw.z, 0.99992).log().neg().expm1().log()  # softplus(z) = -log 0.99992
    slow = raw._replace(z=z, a_log=torch.zeros(1), dt_bias=torch.zeros(16), beta_logits=raw.beta_logits - 5)
    assert_exact(slow.activations(lambda x: x.to(dtype)), bound)


@pytest.mark.parametrize("gates", ["bounded, anywhere", "softplus, anywhere"])
@pytest.mark.parametrize("operand", [name for name in Raw._fields if name != "lower_bound"])
def test_what_is_not_finite_shows(operand: str, gates: str) -> None:
    raw = make(20, gates)
    getattr(raw, operand).view(-1)[0] = torch.nan
    output, state = kda_fused(*raw)
    assert output.isnan().any() or state.isnan().any()


@pytest.mark.parametrize("gates", ["bounded, anywhere", "softplus, anywhere"])
@pytest.mark.parametrize("a_log", [20.0, 88.5, 100.0])
def test_rates_that_float32_hardly_holds(a_log: float, gates: str) -> None:
    raw = make(20, gates)._replace(a_log=torch.full((1,), a_log))
    raw.z[:, 3] = 0.0  # times an infinite rate it would not be a number
    raw.dt_bias[:4] = 0.0
    assert_exact(raw)


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e-3, 1e-2])
def test_keys_of_hardly_any_length(scale: float) -> None:
    """The 1e-6 under the root of the normalisation decides here."""
    raw = make(20)
    assert_exact(raw._replace(k=raw.k * scale, q=raw.q * max(scale, 1e-4)))
