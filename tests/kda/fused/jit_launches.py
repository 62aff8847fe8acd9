"""What Triton's JIT would compile for the launches of the fused path; run as a program, without TRITON_INTERPRET.

    python tests/kda/fused/jit_launches.py

The host functions run on CPU tensors. In the place of each kernel stands a recorder, which hands the arguments of a
launch to that part of the JIT that decides what to compile, and computes nothing. Printed is one JSON object: how many
launches there were, the forms that `specialisations` lists and no launch asked for, and the reverse.
"""

import json
from itertools import product
from typing import Any, NamedTuple, get_args

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from kimik3_cli.engine.kda.decode import KdaConstants
from kimik3_cli.engine.kda.fused import decode, prefill
from kimik3_cli.engine.kda.fused.launch import LARGEST_HEAD, SMALLEST_HEAD, Precision, specialisations

SIZES = range(SMALLEST_HEAD, LARGEST_HEAD + 1)
DTYPES = (torch.float32, torch.bfloat16)
# (B,T,H): counts of 1, of 16 and of no kind that a compiler treats apart
COUNTS = ((1, 1, 1), (1, 16, 16), (2, 37, 3))


class Form(NamedTuple):
    """All that a compiled kernel depends on."""

    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    divisible: tuple[tuple[int, ...], ...]
    num_warps: int
    num_stages: int


class Recorder:
    """Stands for a kernel and keeps the forms of its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.forms, self.launches = kernel, set[Form](), 0
        self.backend = make_backend(GPUTarget("cuda", 90, 32))
        self.binder = create_function_from_signature(kernel.signature, kernel.params, self.backend)

    def __getitem__(self, _grid: tuple[int, ...]) -> Any:
        return self.launch

    def launch(self, *args: Any, **kwargs: Any) -> None:
        bound, specialised, rest = self.binder(*args, **kwargs)
        options, signature, constants, attributes = self.kernel._pack_args(
            self.backend, kwargs, bound, specialised, rest
        )
        named = {self.kernel.arg_names[position]: value for (position,), value in constants.items()}
        launch = (options.num_warps, options.num_stages)
        self.forms.add(form(self.kernel, signature, named, attributes, *launch))
        self.launches += 1


def form(kernel: Any, signature: Any, constants: Any, attributes: Any, num_warps: int, num_stages: int) -> Form:
    divisible = {position: value for position, value in attributes.items() if value}
    assert all(value == [["tt.divisibility", 16]] for value in divisible.values())
    return Form(
        kernel.__name__,
        tuple(signature.items()),
        tuple(sorted(constants.items())),
        tuple(sorted(divisible)),
        num_warps,
        num_stages,
    )


def listed() -> list[Form]:
    return [form(s.kernel, s.signature, s.constants, s.attributes, **s.options) for s in specialisations()]


def run_prefill(
    counts: tuple[int, int, int], sizes: tuple[int, int], dtype: torch.dtype, bounded: bool, precision: Precision
) -> None:
    (batch, time, heads), (key_size, value_size) = counts, sizes
    q, k, z = (torch.empty(batch, time, heads, key_size, dtype=dtype) for _ in range(3))
    v = torch.empty(batch, time, heads, value_size, dtype=dtype)
    beta = torch.empty(batch, time, heads, dtype=dtype)
    a_log, dt_bias = torch.empty(heads), torch.empty(heads * key_size)
    bound = -5.0 if bounded else None
    prefill.kda_fused(q, k, v, z, beta, a_log, dt_bias, None, bound, input_precision=precision)


def run_decode(batch: int, heads: int, taps: int, size: int, dtype: torch.dtype, bounded: bool) -> None:
    width = 3 * heads * size
    z, gate = (torch.empty(batch, heads, size, dtype=dtype) for _ in range(2))
    constants = KdaConstants(
        taps=torch.empty(taps, width),
        a_log=torch.empty(heads),
        lower_bound=-5.0 if bounded else None,
        out_weight=torch.empty(size),
        out_floor=1e-3,
    )
    tail, memory = torch.empty(batch, taps - 1, width), torch.empty(batch, heads, size, size)
    qkv, beta = torch.empty(batch, width, dtype=dtype), torch.empty(batch, heads, dtype=dtype)
    decode.kda_decode_fused(qkv, z, beta, gate, constants, tail, memory)


def run_everything() -> None:
    """Every head size with every dtype, gate and precision; a kernel sees only one of the two sizes of a head."""
    for size, dtype, bounded in product(SIZES, DTYPES, (True, False)):
        for (batch, _, heads), taps in zip(COUNTS, (2, 17, 4), strict=True):
            run_decode(batch, heads, taps, size, dtype, bounded)
        for precision in get_args(Precision):
            run_prefill(COUNTS[2], (size, 16), dtype, bounded, precision)
    for size, dtype in product(SIZES, DTYPES):
        run_prefill(COUNTS[0], (128, size), dtype, True, "tf32x3")
    for key_size, size, dtype, precision in product((16, 17, 33, 65, 129), (16, 255), DTYPES, get_args(Precision)):
        run_prefill(COUNTS[0], (key_size, size), dtype, True, precision)
    for counts, dtype, precision in product(COUNTS, DTYPES, get_args(Precision)):
        run_prefill(counts, (128, 128), dtype, True, precision)


def main() -> None:
    assert isinstance(prefill.chunk_local, triton.JITFunction), "unset TRITON_INTERPRET"
    recorders = [Recorder(kernel) for kernel in (prefill.chunk_local, prefill.chunk_walk, decode.decode_token)]
    prefill.chunk_local, prefill.chunk_walk, decode.decode_token = recorders
    run_everything()
    launched = set[Form]().union(*(recorder.forms for recorder in recorders))
    expected = listed()
    result = {
        "launches": sum(recorder.launches for recorder in recorders),
        "listed_twice": len(expected) - len(set(expected)),
        "only_listed": sorted(map(str, set(expected) - launched)),
        "only_launched": sorted(map(str, launched - set(expected))),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
