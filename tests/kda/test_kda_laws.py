"""The laws of the KDA kernels: each equals the float64 recurrence, wherever the gates, keys and lengths lie."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kda.kda_inputs import GATES, KEYS, Inputs, make, random_state
from oracle import kda_recurrence_f64
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kimik3_cli.engine.kda.chunkwise import kda_chunkwise
from kimik3_cli.engine.kda.recurrent import kda_recurrent

BOUND = 2e-5
CHUNK_SIZES = (16, 32, 64, 128, 256)
Kernel = Callable[..., tuple[Tensor, Tensor]]
REPEATABLE = settings(derandomize=True, deadline=None, max_examples=40)


def assert_equal(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], bound: float = BOUND) -> None:
    """Outputs and state: finite, and max|difference| <= bound * max|expected|."""
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        assert a.isfinite().all()
        error = (a.double() - e.double()).abs().max() / e.double().abs().max()
        assert error <= bound, f"relative error {error:.2e}"


def lengths(chunk_size: int) -> list[int]:
    """Every length up to 3 chunks + 1 for small chunks; the edges of chunks and sub-blocks for large ones."""
    longest = 3 * chunk_size + 1
    if chunk_size <= 64:
        return list(range(1, longest + 1))
    edges = {multiple + step for multiple in range(0, longest + 1, chunk_size // 2) for step in (-1, 0, 1)}
    inside = {1, 2, 3, 15, 16, 17, 31, 32, 33, *range(5, longest, 37)}
    return sorted(n for n in edges | inside if 1 <= n <= longest)


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
def test_chunkwise_at_every_length(chunk_size: int, gates: str) -> None:
    inputs = make(3 * chunk_size + 1, gates, heads=1)
    expected_outputs, states = every_state(inputs)
    for length in lengths(chunk_size):
        actual = kda_chunkwise(*inputs.part(0, length), chunk_size=chunk_size)
        assert_equal(actual, (expected_outputs[:, :length], states[length - 1]))


def every_state(inputs: Inputs) -> tuple[Tensor, list[Tensor]]:
    """The float64 outputs and the state after every token."""
    outputs, states = [], [torch.zeros_like(random_state(inputs))]
    for t in range(inputs.k.shape[1]):
        output, state = kda_recurrence_f64(*inputs.part(t, t + 1), states[-1])
        outputs.append(output)
        states.append(state)
    return torch.cat(outputs, dim=1), states[1:]


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("keys", KEYS)
def test_recurrence_in_float32(gates: str, keys: str) -> None:
    inputs = make(200, gates, keys)
    assert_equal(kda_recurrent(*inputs), kda_recurrence_f64(*inputs))


def test_recurrence_in_float64_is_exact() -> None:
    inputs = Inputs(*(x.double() for x in make(100, "mixed anywhere", batch=2)))
    output, state = kda_recurrent(*inputs, initial_state=random_state(inputs).double())
    assert output.dtype == state.dtype == torch.float64
    assert_equal((output, state), kda_recurrence_f64(*inputs, random_state(inputs)), bound=1e-13)


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
@pytest.mark.parametrize("gates", ["all -5", "all zero", "all near zero", "mixed anywhere"])
@pytest.mark.parametrize("keys", KEYS)
def test_long_sequences(chunk_size: int, gates: str, keys: str) -> None:
    inputs = make(2048, gates, keys, heads=1)
    assert_equal(kda_chunkwise(*inputs, chunk_size=chunk_size), kda_recurrence_f64(*inputs))


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("keys", ["all equal", "nearly equal"])
def test_correlated_keys(chunk_size: int, gates: str, keys: str) -> None:
    inputs = make(2 * chunk_size + 5, gates, keys)
    assert_equal(kda_chunkwise(*inputs, chunk_size=chunk_size), kda_recurrence_f64(*inputs))


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("keys", ["random", "all equal"])
def test_beta_at_its_limits(value: float, keys: str) -> None:
    inputs = make(100, "all near zero", keys)
    inputs = inputs._replace(beta=torch.full_like(inputs.beta, value))
    state = random_state(inputs)
    assert_equal(kda_chunkwise(*inputs, initial_state=state), kda_recurrence_f64(*inputs, state))


def test_one_deep_gate_beside_channels_that_never_forget() -> None:
    """One token below -88 alone overflows a factored decay in float32; its neighbours must not notice."""
    for position in (0, 1, 15, 16, 40, 63, 64, 99):
        inputs = make(100, "all near zero")
        inputs.g[:, position, :, ::2] = -100.0
        assert_equal(kda_chunkwise(*inputs), kda_recurrence_f64(*inputs))


@REPEATABLE
@given(
    length=st.integers(1, 160),
    chunk_size=st.sampled_from(CHUNK_SIZES),
    gates=st.sampled_from(sorted(GATES)),
    keys=st.sampled_from(sorted(KEYS)),
    sizes=st.tuples(st.sampled_from([1, 3, 16, 24]), st.sampled_from([1, 5, 16, 32])),
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    has_state=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_state(
    length: int,
    chunk_size: int,
    gates: str,
    keys: str,
    sizes: tuple[int, int],
    batch: int,
    heads: int,
    has_state: bool,
    seed: int,
) -> None:
    inputs = make(length, gates, keys, batch=batch, heads=heads, sizes=sizes, seed=seed)
    state = random_state(inputs) if has_state else None
    expected = kda_recurrence_f64(*inputs, state)
    for actual in (kda_chunkwise(*inputs, state, chunk_size=chunk_size), kda_recurrent(*inputs, state)):
        assert actual[0].dtype == actual[1].dtype == torch.float32
        assert_equal(actual, expected)


@REPEATABLE
@given(
    cuts=st.lists(st.integers(1, 199), max_size=4, unique=True).map(sorted),
    chunk_size=st.sampled_from(CHUNK_SIZES),
    gates=st.sampled_from(sorted(GATES)),
    keys=st.sampled_from(sorted(KEYS)),
)
def test_splitting_changes_nothing(cuts: list[int], chunk_size: int, gates: str, keys: str) -> None:
    inputs = make(200, gates, keys, batch=2)
    expected = kda_recurrence_f64(*inputs)
    outputs, state = [], None
    for start, stop in pairwise([0, *cuts, 200]):
        output, state = kda_chunkwise(*inputs.part(start, stop), state, chunk_size=chunk_size)
        outputs.append(output)
    assert state is not None
    assert_equal((torch.cat(outputs, dim=1), state), expected)


def test_the_two_forms_hand_their_states_to_each_other() -> None:
    inputs = make(130, "mixed anywhere")
    expected = kda_recurrence_f64(*inputs)
    for first, second in ((kda_chunkwise, kda_recurrent), (kda_recurrent, kda_chunkwise)):
        head, state = first(*inputs.part(0, 75))
        tail, state = second(*inputs.part(75, 130), state)
        assert_equal((torch.cat([head, tail], dim=1), state), expected)


def test_token_by_token_with_carried_state() -> None:
    inputs = make(40, "mixed tokens")
    outputs, state = [], None
    for t in range(40):
        output, state = kda_chunkwise(*inputs.part(t, t + 1), state)
        outputs.append(output)
    assert state is not None
    assert_equal((torch.cat(outputs, dim=1), state), kda_recurrence_f64(*inputs))


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_earlier_outputs_do_not_see_later_tokens(chunk_size: int, gates: str) -> None:
    inputs, noise = make(150, gates), make(150, "anywhere above -60", seed=1)
    before, _ = kda_chunkwise(*inputs, chunk_size=chunk_size)
    for length in (1, 15, 16, 17, 63, 64, 65, 100):
        changed = Inputs(
            *(torch.cat([x[:, :length], y[:, length:]], dim=1) for x, y in zip(inputs, noise, strict=True))
        )
        after, _ = kda_chunkwise(*changed, chunk_size=chunk_size)
        assert torch.equal(after[:, :length], before[:, :length])


@pytest.mark.parametrize("kernel", [kda_chunkwise, kda_recurrent])
def test_rows_of_a_batch_do_not_see_each_other(kernel: Kernel) -> None:
    inputs = make(70, "mixed anywhere", batch=3)
    together, states = kernel(*inputs)
    for row in range(3):
        assert_equal(kernel(*inputs.rows(row, row + 1)), (together[row : row + 1], states[row : row + 1]))


@pytest.mark.parametrize("kernel", [kda_chunkwise, kda_recurrent])
def test_inputs_are_left_as_they_were(kernel: Kernel) -> None:
    inputs = make(70)
    state = random_state(inputs)
    copies = [x.clone() for x in (*inputs, state)]
    kernel(*inputs, state)
    assert all(torch.equal(x, copy) for x, copy in zip((*inputs, state), copies, strict=True))


def test_memory_order_of_the_inputs_does_not_matter() -> None:
    inputs = make(70, batch=2)
    strided = Inputs(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs))
    assert not strided.q.is_contiguous()
    assert_equal(kda_chunkwise(*strided), kda_chunkwise(*inputs))


@pytest.mark.parametrize("gates", ["anywhere above -5", "all -5", "mixed anywhere", "all near zero"])
@pytest.mark.parametrize("keys", ["random", "all equal"])
def test_gradients(gates: str, keys: str) -> None:
    inputs = make(75, gates, keys)
    expected = gradients(kda_recurrence_f64, Inputs(*(x.double() for x in inputs)))
    actual = gradients(lambda *x: kda_chunkwise(*x, chunk_size=32), inputs)
    for a, e in zip(actual, expected, strict=True):
        assert a.isfinite().all()
        assert (a - e).abs().max() <= 1e-4 * max(1.0, e.abs().max().item())


def gradients(kernel: Kernel, inputs: Inputs) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs, state = kernel(*leaves)
    (outputs.sin().sum() + state.cos().sum()).backward()
    return [leaf.grad.double() for leaf in leaves if leaf.grad is not None]


def slow_inputs(length: int) -> Inputs:
    """Each channel forgets at a constant slow rate and little is written over it, so that every rounding adds up."""
    inputs = make(length, heads=4, sizes=(32, 16))
    g = -(10 ** (-5 + 2 * torch.rand(4, 32, generator=torch.Generator().manual_seed(3))))
    return inputs._replace(g=g.expand_as(inputs.g), beta=inputs.beta * 0.01)


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
def test_constant_slow_decays_chunkwise(chunk_size: int) -> None:
    inputs = slow_inputs(2048)
    assert_equal(kda_chunkwise(*inputs, chunk_size=chunk_size), kda_recurrence_f64(*inputs))


def test_constant_slow_decays_token_by_token() -> None:
    """A float32 step rounds exp(g) by up to 2^-25, always the same way: the bound allows no more than 512 steps."""
    inputs = slow_inputs(512)
    assert_equal(kda_recurrent(*inputs), kda_recurrence_f64(*inputs))


@pytest.mark.parametrize("kernel", [kda_chunkwise, kda_recurrent])
def test_slow_decay_keeps_its_precision(kernel: Kernel) -> None:
    """A decay of 0.99992 rounds to 1 in bfloat16; over 4096 steps that is a state of another size."""
    inputs = make(4096, "all zero", heads=1, sizes=(16, 16))
    inputs = inputs._replace(g=torch.full_like(inputs.g, 0.99992).log(), beta=inputs.beta * 0.01)
    assert_equal(kernel(*inputs), kda_recurrence_f64(*inputs), bound=1e-5)


class LargestTensor(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else [result]:
            if isinstance(made, Tensor):
                self.elements = max(self.elements, made.untyped_storage().nbytes() // made.element_size())
        return result


@pytest.mark.parametrize("chunk_size", [64, 128, 256])
def test_pairwise_decays_are_never_held_for_the_whole_sequence(chunk_size: int) -> None:
    inputs = make(1024, heads=2, sizes=(32, 32))
    with LargestTensor() as largest:
        kda_chunkwise(*inputs, chunk_size=chunk_size)
    assert inputs.k.numel() <= largest.elements < inputs.k.numel() * chunk_size // 2
