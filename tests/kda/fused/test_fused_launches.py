"""What the host side launches: how many kernels, in which compiled forms, and what it refuses instead."""

from typing import Any

import pytest
import torch
from guarded import plain_allocations
from raw_inputs import make
from test_fused_decode import make_layer, make_token
from torch.utils._python_dispatch import TorchDispatchMode
from triton_interpreter import LaunchRecord, recorded_launches

from kimik3_cli.engine.kda.fused import operands
from kimik3_cli.engine.kda.fused.decode import kda_decode_fused
from kimik3_cli.engine.kda.fused.launch import specialisations
from kimik3_cli.engine.kda.fused.prefill import kda_fused
from kimik3_cli.errors import DeviceError, RequestError

SIZES = (16, 17, 24, 31, 32, 33, 48, 60, 64, 65, 96, 100, 127, 128, 129, 192, 255, 256)
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}


class OperationsThatLaunch(TorchDispatchMode):
    """Names every operation of PyTorch that is more than a view, an allocation or a look at a number on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.overloadpacket.__name__ not in ("empty", "view", "_unsafe_view", "_local_scalar_dense"):
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("length", [1, 17, 300])
def test_launches_of_a_prefill(length: int) -> None:
    raw = make(length, batch=2, heads=2)
    for has_state, others in ((True, []), (False, ["zeros"])):
        state = raw.initial_state if has_state else None
        with recorded_launches(run=False) as launches, plain_allocations(), OperationsThatLaunch() as operations:
            kda_fused(*raw._replace(initial_state=state))
        assert [launch.kernel for launch in launches] == ["chunk_local", "chunk_walk"]
        assert operations.names == others
        assert len(launches) + len(operations.names) <= 3


def test_launches_of_a_decoded_token() -> None:
    layer, token = make_layer(2, 2, 16, 4, None), make_token(2, 2, 16, seed=1)
    with recorded_launches(run=False) as launches, plain_allocations(), OperationsThatLaunch() as operations:
        kda_decode_fused(*token, layer.constants, layer.tail, layer.memory)
    assert [launch.kernel for launch in launches] == ["decode_token"]
    assert launches[0].grid == (4,)
    assert operations.names == []


def test_more_programs_than_an_axis_but_the_first_holds() -> None:
    """The second axis of a grid ends at 65,535; batch times heads and the chunks lie on the first."""
    raw = make(2, batch=4, heads=3, sizes=(16, 40))
    with recorded_launches(run=False) as launches:
        kda_fused(*raw)
    assert [launch.grid for launch in launches] == [(4 * 3 * 1,), (4 * 3, 2)]


def described(launch: LaunchRecord) -> tuple[Any, ...]:
    """What decides the compiled form of a launch, as the compiler sees its arguments."""
    from kimik3_cli.engine.kda.fused import decode_kernel, prefill_kernels

    kernel = getattr(prefill_kernels, launch.kernel, None) or getattr(decode_kernel, launch.kernel)
    unspecialised = set(kernel.kwargs["do_not_specialize"])
    form: list[Any] = [launch.kernel]
    for name in kernel.arg_names:
        value = launch.arguments[name]
        if isinstance(value, torch.Tensor):
            form.append((name, TYPES[value.dtype], value.data_ptr() % 16 == 0))
        elif isinstance(value, float):
            form.append((name, "fp32", False))
        elif name in unspecialised or isinstance(value, bool | str) or name in ("C", "KP", "BV", "R"):
            form.append((name, "i32", False) if name in unspecialised else (name, value))
        else:
            form.append((name, "i32", value % 16 == 0))
    return (*form, launch.arguments["num_warps"], launch.arguments["num_stages"])


def enumerated() -> set[tuple[Any, ...]]:
    forms = set()
    for each in specialisations():
        form: list[Any] = [each.kernel.__name__]
        for position, (name, kind) in enumerate(each.signature.items()):
            known = (
                (name, each.constants[name]) if kind == "constexpr" else (name, kind, (position,) in each.attributes)
            )
            form.append(known)
        forms.add((*form, each.options["num_warps"], each.options["num_stages"]))
    return forms


def test_every_launch_is_an_enumerated_specialisation() -> None:
    """Head sizes of every kind, dtypes, gates and precisions; and nothing is enumerated that cannot be launched."""
    with recorded_launches(run=False) as launches:
        for size in SIZES:
            for dtype in TYPES:
                for gates in ("bounded, anywhere", "softplus, anywhere"):
                    raw = make(1, gates, sizes=(size, size)).activations(lambda x, dtype=dtype: x.to(dtype))
                    for precision in ("ieee", "tf32", "tf32x3"):
                        for value_size in (32, 33):
                            v = torch.zeros(1, 1, 1, value_size, dtype=dtype)
                            state = torch.zeros(1, 1, size, value_size)
                            kda_fused(*raw._replace(v=v, initial_state=state), input_precision=precision)
                    layer = make_layer(1, 1, size, 2, raw.lower_bound)
                    token = (x.to(dtype) for x in make_token(1, 1, size, seed=1))
                    kda_decode_fused(*token, layer.constants, layer.tail, layer.memory)
    assert {described(launch) for launch in launches} == enumerated()


def test_wrong_operands_are_refused_by_name() -> None:
    raw = make(5, heads=2)
    with pytest.raises(RequestError, match=r"z has the shape \[1, 4, 2, 16\]; the fused path needs \[1, 5, 2, 16\]"):
        kda_fused(*raw._replace(z=raw.z[:, :4]))
    with pytest.raises(RequestError, match=r"initial_state has the shape \[1, 2, 16, 15\]"):
        kda_fused(*raw._replace(initial_state=raw.initial_state[..., :15]))
    with pytest.raises(
        RequestError, match=r"q is torch.float16; the fused path takes torch.float32 and torch.bfloat16"
    ):
        kda_fused(*raw._replace(q=raw.q.half()))
    with pytest.raises(RequestError, match="input_precision is 'fp8'; give ieee, tf32 or tf32x3"):
        kda_fused(*raw, input_precision="fp8")
    with pytest.raises(DeviceError, match="v is on meta and k on cpu; put both on one device"):
        kda_fused(*raw._replace(v=raw.v.to("meta")))
    with (
        torch.enable_grad(),
        pytest.raises(DeviceError, match="a_log requires a gradient; the fused path computes none"),
    ):
        kda_fused(*raw._replace(a_log=raw.a_log.clone().requires_grad_()))
    with pytest.raises(ValueError, match="k holds no token; give at least one"):
        kda_fused(*raw.part(0, 0, raw.initial_state))


@pytest.mark.parametrize("sizes", [(15, 16), (257, 16), (16, 8), (16, 300)])
def test_head_sizes_out_of_range_are_refused(sizes: tuple[int, int]) -> None:
    wrong = next(size for size in sizes if not 16 <= size <= 256)
    with pytest.raises(DeviceError, match=f"the head size is {wrong}; the fused path has 16 to 256, use chunkwise"):
        kda_fused(*make(2, sizes=sizes))


def test_compiled_kernels_refuse_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the interpreter a kernel is a JITFunction, and a CPU tensor must not reach it."""
    monkeypatch.setattr(operands.triton, "JITFunction", object)
    message = "the fused path needs a CUDA device, or the CPU with TRITON_INTERPRET=1; k is on cpu"
    with pytest.raises(DeviceError, match=message):
        kda_fused(*make(2))


def test_states_that_cannot_be_advanced_in_place_are_refused() -> None:
    layer, token = make_layer(1, 2, 16, 4, None), make_token(1, 2, 16, seed=1)
    with pytest.raises(RequestError, match="memory is advanced in place; give contiguous float32"):
        kda_decode_fused(*token, layer.constants, layer.tail, layer.memory.transpose(2, 3))
    with pytest.raises(RequestError, match="tail is advanced in place; give contiguous float32"):
        kda_decode_fused(*token, layer.constants, layer.tail.bfloat16(), layer.memory)
    unaligned = torch.zeros(layer.memory.numel() + 1)[1:].view_as(layer.memory)
    with pytest.raises(RequestError, match=r"memory is advanced in place; .* starts at 16 bytes"):
        kda_decode_fused(*token, layer.constants, layer.tail, unaligned)
