"""The delta rule over chunks and the two attentions of one token, compiled, against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kda.kda_inputs import GATES, KEYS, make, random_state
from native.operands import BOUND, assert_rows_close, numbers, rows_apart
from oracle import kda_recurrence_f64
from strategies import REPEATABLE
from torch import Tensor

from kimik3_cli.engine.native import operations as compiled
from kimik3_cli.engine.native.operations import LatentAttention

pytestmark = pytest.mark.usefixtures("threads")

CHUNK_SIZES = (16, 32, 64, 128, 256)
GATES_TO_TRY = {**GATES, "all -100": lambda noise: torch.full_like(noise, -100.0)}


def assert_close(actual: Tensor, expected: Tensor, bound: float = BOUND) -> None:
    assert actual.isfinite().all()
    error = ((actual.double() - expected).abs().max() / expected.abs().max()).item()
    assert error <= bound, f"relative error {error:.2e}"


@settings(REPEATABLE, max_examples=120)
@given(
    gates=st.sampled_from(sorted(GATES_TO_TRY)),
    keys=st.sampled_from(sorted(KEYS)),
    chunk_size=st.sampled_from(CHUNK_SIZES),
    length=st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 129, 300])),
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    sizes=st.sampled_from([(1, 1), (8, 12), (16, 16), (17, 33), (64, 64), (48, 80)]),
    started=st.booleans(),
)
def test_chunks(
    gates: str,
    keys: str,
    chunk_size: int,
    length: int,
    batch: int,
    heads: int,
    sizes: tuple[int, int],
    started: bool,
) -> None:
    """Any gates, keys, lengths, chunks and sizes, from a state of zeros or any other."""
    inputs = make(length, "all zero", keys, batch=batch, heads=heads, sizes=sizes)
    noise = torch.rand(inputs.k.shape, generator=torch.Generator().manual_seed(5))
    inputs = inputs._replace(g=GATES_TO_TRY[gates](noise).contiguous())
    state = random_state(inputs) if started else torch.zeros_like(random_state(inputs))
    expected, expected_state = kda_recurrence_f64(*inputs, state)
    out = torch.full_like(inputs.v, float("nan"))
    compiled.kda_chunks(*(x.contiguous() for x in inputs), state, chunk_size, out)
    assert_close(out, expected)
    if expected_state.abs().max() > 1e-20:
        assert_close(state, expected_state)


def test_nan_stays_in_its_head_and_after_its_token() -> None:
    inputs = make(100, batch=2, heads=3)
    inputs.v[1, 40, 2, 3] = float("nan")
    state, out = torch.zeros_like(random_state(inputs)), torch.zeros_like(inputs.v)
    compiled.kda_chunks(*(x.contiguous() for x in inputs), state, 32, out)
    assert out[1, 40:, 2, 3].isnan().all()
    assert state[1, 2, :, 3].isnan().all()
    out[1, 32:, 2] = 0  # from its chunk on
    state[1, 2] = 0
    assert out.isfinite().all()
    assert state.isfinite().all()


def attended(q: Tensor, expand: Tensor, gate: Tensor | None, nope: int, scale: float, rows: Tensor) -> Tensor:
    """The attention with keys and values expanded, in float64: [B,H*V]."""
    q, expand, rows = q.double(), expand.double(), rows.double()
    latent = rows[..., : expand.shape[2]]
    keys = torch.einsum("blc,hnc->bhln", latent, expand[:, :nope])
    values = torch.einsum("blc,hvc->bhlv", latent, expand[:, nope:])
    shared = torch.einsum("bhr,blr->bhl", q[..., nope:], rows[..., expand.shape[2] :])
    scores = (torch.einsum("bhn,bhln->bhl", q[..., :nope], keys) + shared) * scale
    out = torch.einsum("bhl,bhlv->bhv", scores.softmax(-1), values).flatten(1)
    return out if gate is None else out * torch.sigmoid(gate.double())


@settings(REPEATABLE, max_examples=80)
@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 4),
    sizes=st.sampled_from([(1, 1, 1, 1), (4, 2, 5, 3), (8, 4, 12, 16), (32, 16, 96, 33), (64, 32, 130, 64)]),
    length=st.one_of(st.integers(1, 70), st.sampled_from([127, 1000, 3001])),
    gated=st.booleans(),
    sharpness=st.sampled_from([0.1, 1.0, 30.0]),
)
def test_latent_attention(
    batch: int, heads: int, sizes: tuple[int, int, int, int], length: int, gated: bool, sharpness: float
) -> None:
    """Contexts shorter and longer than a piece, flat and peaked weights, rows of q, gate and context apart."""
    nope, shared, latent, value = sizes
    q = rows_apart(numbers(batch, heads * (nope + shared), scale=sharpness)).view(batch, heads, -1)
    expand = numbers(heads, nope + value, latent, seed=1)
    gate = rows_apart(numbers(batch, heads * value, seed=2)) if gated else None
    cache = torch.full((batch, length + 3, latent + shared), float("nan"))
    rows = cache[:, :length]
    rows.copy_(numbers(batch, length, latent + shared, seed=3))
    attend = LatentAttention(q, expand, gate, nope, (nope + shared) ** -0.5)
    attend(rows)
    assert_rows_close(attend.out, attended(q, expand, gate, nope, (nope + shared) ** -0.5, rows), 1e-4)


def test_attention_grows_with_its_context() -> None:
    """One object for a whole request: each call sees the rows of that moment."""
    q, expand, rows = numbers(1, 2, 12), numbers(2, 16, 20, seed=1), numbers(1, 200, 24, seed=2)
    attend = LatentAttention(q, expand, None, 8, 0.3)
    for length in (1, 2, 33, 199, 200):
        attend(rows[:, :length])
        assert_rows_close(attend.out, attended(q, expand, None, 8, 0.3, rows[:, :length]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_row_of_the_context_reaches_the_result(bad: float) -> None:
    q, expand, rows = numbers(1, 2, 12), numbers(2, 16, 20, seed=1), numbers(1, 200, 24, seed=2)
    rows[0, 150, 3] = bad
    attend = LatentAttention(q, expand, None, 8, 0.3)
    attend(rows)
    assert attend.out.isnan().all()
