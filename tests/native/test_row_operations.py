"""Norms, depth mix, activations, convolution and decay gate, compiled, against the same formulas in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from native.operands import BEYOND_THREADS, assert_rows_close, numbers, rows_apart, untouched
from strategies import REPEATABLE
from torch import Tensor

from kimik3_cli.engine.native import operations as compiled
from kimik3_cli.engine.native.operations import Caps

pytestmark = pytest.mark.usefixtures("threads")

WIDTHS = st.one_of(st.integers(1, 70), st.sampled_from([128, 769, 2048]))
NAN, INF = float("nan"), float("inf")


def normed(x: Tensor, weight: Tensor | None, scale: float, floor: float) -> Tensor:
    x = x.double()
    unit = x / (x.square().sum(-1, keepdim=True) + floor * floor).sqrt()
    return unit * scale if weight is None else unit * scale * weight.double()


@REPEATABLE
@given(
    rows=st.sampled_from([1, 2, 3, 31, 600]),
    width=WIDTHS,
    magnitude=st.sampled_from([1e-20, 1e-3, 1.0, 1e4, 1e25]),
    weighted=st.booleans(),
    in_place=st.booleans(),
)
def test_rms_norm(rows: int, width: int, magnitude: float, weighted: bool, in_place: bool) -> None:
    """From numbers whose squares underflow to those whose squares overflow float32."""
    x = rows_apart(numbers(rows, width, scale=magnitude))
    weight = numbers(width, seed=1) if weighted else None
    expected = normed(x, weight, 1.7, 1e-3)
    out = x if in_place else untouched(rows, width)
    compiled.rms_norm(x, weight, 1.7, 1e-3, out)
    assert_rows_close(out, expected, 1e-6)


@REPEATABLE
@given(
    count=st.integers(1, 9), rows=st.sampled_from([1, 2, 5, 70]), width=WIDTHS, sharpness=st.sampled_from([0, 1, 60])
)
def test_mixed_norm(count: int, rows: int, width: int, sharpness: float) -> None:
    sources = [numbers(rows, width, seed=n, scale=10.0**n) for n in range(count)]
    query, weight = numbers(width, seed=77, scale=sharpness), numbers(width, seed=78)
    scores = torch.stack([normed(source, query, 1.0, 1e-2).sum(-1) for source in sources])  # [n,N]
    mixed = (scores.softmax(0).unsqueeze(-1) * torch.stack(sources).double()).sum(0)
    out = untouched(rows, width)
    compiled.mixed_norm(sources, query, 1e-2, weight, 2.0, 1e-3, out)
    assert_rows_close(out, normed(mixed, weight, 2.0, 1e-3), 1e-4)


@REPEATABLE
@given(
    rows=st.sampled_from([1, 3, 500]),
    width=WIDTHS,
    caps=st.sampled_from([Caps(), Caps(4.0), Caps(4.0, 25.0), Caps(0.5, 1.0)]),
    magnitude=st.sampled_from([1e-4, 1.0, 30.0, 500.0]),
)
def test_gated(rows: int, width: int, caps: Caps, magnitude: float) -> None:
    gate, up = (
        rows_apart(numbers(rows, width, scale=magnitude)),
        rows_apart(numbers(rows, width, seed=1, scale=magnitude)),
    )
    x, y = gate.double(), up.double()
    act = F.silu(x) if caps.gate == 0 else caps.gate * torch.tanh(x / caps.gate) * torch.sigmoid(x)
    expected = act * (y if caps.up == 0 else caps.up * torch.tanh(y / caps.up))
    out = untouched(rows, width)
    compiled.gated(gate, up, caps, out)
    torch.testing.assert_close(out.double(), expected, rtol=2e-6, atol=1e-30)


@REPEATABLE
@given(
    batch=st.integers(1, 3),
    time=st.sampled_from([1, 2, 3, 4, 17, 130]),
    width=WIDTHS,
    kernel=st.integers(1, 5),
)
def test_short_conv(batch: int, time: int, width: int, kernel: int) -> None:
    x, taps = numbers(batch, time, width), numbers(kernel, width, seed=1)
    tail = numbers(batch, kernel - 1, width, seed=2)
    window = torch.cat([tail, x], dim=1).double()
    total = sum((window[:, shift : shift + time] * taps[shift].double() for shift in range(kernel)), torch.zeros(()))
    out = untouched(batch, time, width)
    compiled.short_conv(x, taps, tail, out)
    torch.testing.assert_close(out.double(), F.silu(total), rtol=1e-5, atol=1e-5)


@REPEATABLE
@given(
    rows=st.sampled_from([1, 3, 90]),
    heads=st.integers(1, 4),
    size=st.integers(1, 130),
    lower_bound=st.sampled_from([None, -5.0, -1.5, -90.0]),
    magnitude=st.sampled_from([1e-3, 1.0, 40.0]),
)
def test_log_decay(rows: int, heads: int, size: int, lower_bound: float | None, magnitude: float) -> None:
    """Gates that are nearly shut and nearly open keep their own digits, not only those of the largest."""
    z, bias = numbers(rows, heads, size, scale=magnitude), numbers(heads * size, seed=1, scale=magnitude)
    rate = numbers(heads, 1, seed=2).exp() * (1 if lower_bound else -1)
    biased = (z + bias.view(heads, size)).double()
    if lower_bound:
        expected = lower_bound * torch.sigmoid(biased * rate.double())
    else:
        expected = rate.double() * torch.logaddexp(biased, torch.zeros_like(biased))  # softplus without a threshold
    out = untouched(rows, heads, size)
    compiled.log_decay(z, bias, rate, lower_bound, out)
    assert (out <= 0).all()
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=1e-30)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_stays_in_its_row(bad: float) -> None:
    """And never turns into a number there; the other rows do not notice. Enough rows for both threads."""
    rows, width, at = BEYOND_THREADS // 64, 64, 7
    x, one = numbers(rows, width), torch.ones(rows, width)
    x[at, 3] = bad
    outs = [untouched(rows, width) for _ in range(4)]
    compiled.rms_norm(x, torch.ones(width), 8.0, 1e-3, outs[0])
    compiled.mixed_norm([one, x], torch.ones(width), 1e-3, torch.ones(width), 8.0, 1e-3, outs[1])
    compiled.gated(one, x, Caps(), outs[2])
    compiled.short_conv(x.unsqueeze(0), torch.ones(1, width), torch.empty(1, 0, width), outs[3].unsqueeze(0))
    others = torch.arange(rows) != at
    for out in outs:
        assert out[others].isfinite().all()
    assert outs[0][at, 3].isnan()
    assert outs[1][at].isnan().any()
    assert not outs[2][at, 3].isfinite()
    assert outs[3][at, 3].isnan() or outs[3][at, 3] == F.silu(torch.tensor(bad))


@pytest.mark.parametrize("caps", [Caps(), Caps(4.0), Caps(4.0, 25.0)])
def test_nan_passes_activations_and_gates(caps: Caps) -> None:
    for at in (0, 17, 63):
        gate, up = numbers(1, 64), numbers(1, 64, seed=1)
        for x in (gate, up):
            kept, x[0, at] = x[0, at].clone(), NAN
            out = untouched(1, 64)
            compiled.gated(gate, up, caps, out)
            assert out.isnan().nonzero().tolist() == [[0, at]]
            x[0, at] = kept
    for lower_bound in (None, -5.0):
        z, out = numbers(1, 2, 32), untouched(1, 2, 32)
        z[0, 1, 9] = NAN
        compiled.log_decay(z, torch.zeros(64), torch.ones(2, 1), lower_bound, out)
        assert out.isnan().nonzero().tolist() == [[0, 1, 9]]


def test_elementary_functions_over_their_whole_range() -> None:
    """Sigmoid, tanh and softplus as the activations and gates use them: from 1e-38 to where they saturate."""
    sizes = torch.logspace(-38, math.log10(87), 4000)
    x = torch.cat([-sizes.flip(0), torch.zeros(1), sizes]).unsqueeze(0)  # [1,X]
    one, out = torch.ones_like(x), torch.empty_like(x)
    compiled.gated(x, one, Caps(), out)
    torch.testing.assert_close(out.double(), F.silu(x.double()), rtol=1e-6, atol=1e-37)
    compiled.gated(one, x, Caps(1.0, 1.0), out)
    expected = torch.tanh(x.double()) * (torch.tanh(one.double()) * torch.sigmoid(one.double()))
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-37)
    decay = torch.empty(1, 1, x.shape[1])
    compiled.log_decay(x.unsqueeze(0), torch.zeros(x.shape[1]), -torch.ones(1, 1), None, decay)
    softplus = torch.logaddexp(x.double(), torch.zeros_like(x, dtype=torch.float64))
    torch.testing.assert_close(-decay[0].double(), softplus, rtol=1e-6, atol=1e-37)
