"""Inputs on any device for the fused path, and its error against float64; `bench_gpu.py` and its test use them.

Letters: B batch, T time, H heads, K head size (keys and values alike), c convolution kernel.
"""

from typing import Any, NamedTuple

import torch
from kda.fused.guarded import assert_guards, between_guards, watched_allocations
from kda.fused.raw_inputs import Raw, in_float64, make
from oracle import kda_recurrence_f64, log_decay, rms_norm
from torch import Tensor
from torch.nn.functional import silu

from kimik3_cli.engine.kda.decode import KdaConstants
from kimik3_cli.engine.kda.fused.decode import kda_decode_fused
from kimik3_cli.engine.kda.fused.launch import INPUT_PRECISION, Precision
from kimik3_cli.engine.kda.fused.prefill import kda_fused

BOUND = {"ieee": 1e-4, "tf32x3": 1e-4, "tf32": 2e-2}
EPS = 1e-5


class PrefillCase(NamedTuple):
    length: int
    sizes: tuple[int, int]  # K, V
    gates: str = "bounded, anywhere"
    keys: str = "random"
    batch: int = 1
    heads: int = 2
    dtype: torch.dtype = torch.float32
    precision: Precision = INPUT_PRECISION


class DecodeCase(NamedTuple):
    batch: int
    heads: int
    size: int
    taps: int = 4
    lower_bound: float | None = -5.0
    dtype: torch.dtype = torch.float32


CASES = (
    PrefillCase(4101, (128, 128), batch=2),
    PrefillCase(4101, (128, 128), batch=2, dtype=torch.bfloat16),
    PrefillCase(1000, (128, 128), "softplus, near zero", "all equal"),
    PrefillCase(1000, (128, 128), "softplus, near zero", "nearly equal", precision="ieee"),
    PrefillCase(1000, (128, 128), "mixed anywhere", precision="tf32"),
    PrefillCase(333, (128, 128), "bounded, anywhere above -60"),
    PrefillCase(333, (64, 64), "softplus, all -100"),
    PrefillCase(333, (64, 64), "mixed tokens"),
    PrefillCase(17, (24, 60), "mixed channels"),
    PrefillCase(47, (100, 96), "softplus, anywhere", batch=3),
    PrefillCase(15, (16, 16), "bounded, all zero"),
    PrefillCase(33, (256, 255), "mixed anywhere"),
)
DECODE_CASES = (
    DecodeCase(1, 96, 128),
    DecodeCase(8, 96, 128, dtype=torch.bfloat16),
    DecodeCase(64, 8, 128, lower_bound=None),
    DecodeCase(3, 5, 24, taps=2),
    DecodeCase(2, 3, 100, taps=9, lower_bound=None),
    DecodeCase(2, 3, 256, taps=1),
)


def prefill_error(case: PrefillCase, device: torch.device, seed: int, repeats: int) -> dict[str, Any]:
    """Run one case between guards, its outputs NaN before, several times; the outputs must agree bit for bit."""
    raw = make(
        case.length, case.gates, case.keys, batch=case.batch, heads=case.heads, sizes=case.sizes, seed=seed
    ).activations(lambda x: x.to(case.dtype))
    guarded = Raw(*(between_guards(x.to(device)) if isinstance(x, Tensor) else x for x in raw))
    with watched_allocations():
        results = [kda_fused(*guarded, input_precision=case.precision) for _ in range(repeats)]
    for operand in guarded[:8]:
        assert_guards(operand)
    assert_same(results)
    return judged(described(case), seed, results[0], in_float64(raw), BOUND[case.precision])


def decode_error(case: DecodeCase, device: torch.device, seed: int, repeats: int) -> dict[str, Any]:
    """The same for three tokens of the decode step, whose history and state are advanced in place."""
    torch.manual_seed(seed)
    *token, constants, tail, memory = fresh_decode(
        case.batch, case.heads, case.size, case.taps, device=torch.device("cpu"), lower_bound=case.lower_bound
    )
    token = [x.to(case.dtype) for x in token]
    expected_tail, expected_memory = tail.double(), memory.double()
    for _ in range(3):
        y, expected_tail, expected_memory = decode_in_float64(token, constants, expected_tail, expected_memory)
    # a 0-dim constant stays on the CPU, as a layer has it
    on_device = KdaConstants(
        taps=constants.taps.to(device),
        a_log=constants.a_log.to(device),
        lower_bound=constants.lower_bound,
        out_weight=constants.out_weight.to(device),
        out_floor=constants.out_floor,
    )
    results = []
    with watched_allocations():
        for _ in range(repeats):
            states = [between_guards(x.to(device)) for x in (tail, memory)]
            inputs = [between_guards(x.to(device)) for x in token]
            for _ in range(3):
                output = kda_decode_fused(*inputs, on_device, *states)
            results.append((output, *states))
    for state in results[-1][1:]:
        assert_guards(state)
    assert_same(results)
    return judged(described(case), seed, results[0], (y, expected_tail, expected_memory), BOUND["ieee"])


def decode_in_float64(
    token: list[Tensor], constants: KdaConstants, tail: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, next tail and next memory of one token, from the formulas."""
    qkv, z, beta, gate = (x.double() for x in token)
    batch, heads, size = z.shape
    window = torch.cat([tail, qkv[:, None]], dim=1)
    mixed = silu((window * constants.taps.double()).sum(1)).view(batch, 3, 1, heads, size)  # one token
    q, k, v = mixed.unbind(1)  # [B,1,H,K]
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    g = log_decay(constants.a_log.double(), z, constants.lower_bound)
    o, memory = kda_recurrence_f64(q * size**-0.5, k, v, g[:, None], torch.sigmoid(beta)[:, None], memory)
    weight = constants.out_weight.double() / size**0.5
    return rms_norm(o[:, 0], weight, EPS) * torch.sigmoid(gate), window[:, 1:], memory


def fresh_prefill(batch: int, time: int, heads: int, size: int, *, device: torch.device, dtype: torch.dtype) -> Raw:
    """Inputs for a measurement, made on the device: decays above -5 as K3 has them, a first state."""
    q, k, v, z = (torch.randn(batch, time, heads, size, device=device).to(dtype) for _ in range(4))
    beta = torch.randn(batch, time, heads, device=device).to(dtype)
    a_log, dt_bias = torch.rand(heads, device=device), torch.randn(heads * size, device=device) - 2
    return Raw(q, k, v, z, beta, a_log, dt_bias, torch.randn(batch, heads, size, size, device=device), -5.0)


def fresh_decode(
    batch: int, heads: int, size: int, taps: int, *, device: torch.device, lower_bound: float | None = -5.0
) -> tuple[Any, ...]:
    """The arguments of `kda_decode_fused`, float32, random."""
    width = 3 * heads * size
    a_log = torch.rand(heads, device=device)
    constants = KdaConstants(
        taps=torch.randn(taps, width, device=device),
        a_log=a_log,
        lower_bound=lower_bound,
        out_weight=(1 + torch.rand(size, device=device)) * size**0.5,
        out_floor=size * EPS**0.5,
    )
    qkv, beta = torch.randn(batch, width, device=device), torch.randn(batch, heads, device=device)
    z, gate = (4 * torch.randn(batch, heads, size, device=device) for _ in range(2))
    tail = torch.randn(batch, taps - 1, width, device=device)
    return qkv, z, beta, gate, constants, tail, torch.randn(batch, heads, size, size, device=device)


def described(case: PrefillCase | DecodeCase) -> str:
    return " ".join(f"{name}={value}" for name, value in case._asdict().items())


def assert_same(results: list[tuple[Tensor, ...]]) -> None:
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again, strict=True)), "repeats differ"


def judged(
    what: str, seed: int, actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], bound: float
) -> dict[str, Any]:
    """A line of the table; the largest relative error must be within `bound`."""
    error = max(relative_error(a.cpu(), e) for a, e in zip(actual, expected, strict=True) if e.numel())
    assert error <= bound, f"{what} with seed {seed}: relative error {error:.2e}, bound {bound:g}"
    return {"what": what, "seed": seed, "error": error, "bound": bound}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """max|difference| / max|expected|; `actual` must be finite."""
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    return ((actual.double() - expected).abs().max() / expected.abs().max()).item()
