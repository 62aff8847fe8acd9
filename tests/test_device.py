"""Device, precision and backend: resolved or refused with the reason, never replaced in silence."""

from contextlib import nullcontext

import pytest
import torch

from kimik3_cli.engine import inference_autocast, resolve_device
from kimik3_cli.engine.device import resolve_backend
from kimik3_cli.engine.kda import dispatch
from kimik3_cli.errors import DeviceError, RequestError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def two_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("no_cuda")
def test_without_cuda() -> None:
    assert resolve_device("auto") == resolve_device("cpu") == CPU
    for name in ("cuda", "cuda:0", "cuda:99"):
        with pytest.raises(DeviceError, match=f"--device is '{name}', but no CUDA device is available here"):
            resolve_device(name)


@pytest.mark.usefixtures("two_cuda_devices")
def test_with_two_cuda_devices() -> None:
    assert resolve_device("auto") == resolve_device("cuda") == CUDA
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(DeviceError, match=r"'cuda:2', but this machine has 2 CUDA device\(s\), cuda:0 to cuda:1"):
        resolve_device("cuda:2")


@pytest.mark.parametrize("name", ["gpu", "", "CPU", "cuda:", "cuda:-1", "cuda:x", "cuda:0 ", "mps", "cuda:١"])
def test_unknown_words(name: str) -> None:
    with pytest.raises(RequestError, match="give auto, cpu, cuda or cuda:N"):
        resolve_device(name)
    with pytest.raises(ValueError, match="give auto"):
        resolve_device(name)


def test_precision() -> None:
    assert isinstance(inference_autocast(CPU, "fp32"), nullcontext)
    with pytest.raises(DeviceError, match="'bf16', but bf16 runs on CUDA only and the device is 'cpu'"):
        inference_autocast(CPU, "bf16")
    for name in ("fp16", "bfloat16", ""):
        with pytest.raises(RequestError, match=f"--precision is '{name}'; give fp32 or bf16"):
            inference_autocast(CPU, name)


def test_bf16_needs_hardware_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Old Card")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    with pytest.raises(DeviceError, match="Old Card lacks bf16; give fp32"):
        inference_autocast(CUDA, "bf16")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert isinstance(inference_autocast(CUDA, "bf16"), torch.autocast)


def test_backend_without_cuda() -> None:
    assert resolve_backend(None, CPU) == resolve_backend("chunkwise", CPU) == "chunkwise"
    with pytest.raises(DeviceError, match="'fused', but the fused path needs a CUDA device and the device is 'cpu'"):
        resolve_backend("fused", CPU)
    with pytest.raises(RequestError, match="--backend is 'triton'; give chunkwise or fused"):
        resolve_backend("triton", CPU)


@pytest.mark.parametrize(
    ("lacking", "capability", "head_dim", "reason"),
    [
        ("triton", (9, 0), 128, r"the package triton, which is not installed \(pip install triton\)"),
        ("triton", (7, 5), 8, r"the package triton, which is not installed \(pip install triton\)"),
        (None, (7, 5), 8, "compute capability 8.0 and Some Card has 7.5"),
        (None, (9, 0), 8, "a head_dim from 16 to 256 and the model's is 8"),
        (None, (9, 0), 257, "a head_dim from 16 to 256 and the model's is 257"),
    ],
)
def test_the_first_condition_that_fused_lacks(
    lacking: str | None, capability: tuple[int, int], head_dim: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda_machine(monkeypatch, lacking, capability)
    assert resolve_backend(None, CUDA, head_dim) == resolve_backend("chunkwise", CUDA, head_dim) == "chunkwise"
    with pytest.raises(DeviceError, match=f"'fused', but the fused path needs {reason}; give chunkwise"):
        resolve_backend("fused", CUDA, head_dim)


def test_fused_is_not_for_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_machine(monkeypatch, None, (9, 0))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resolve_backend(None, CUDA, 128) == "chunkwise"
    with pytest.raises(DeviceError, match="needs compiled kernels and TRITON_INTERPRET is set"):
        resolve_backend("fused", CUDA, 128)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_fused_is_the_default_where_it_can_run(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_machine(monkeypatch, None, capability)
    for head_dim in (None, 16, 60, 256):
        assert resolve_backend(None, CUDA, head_dim) == resolve_backend("fused", CUDA, head_dim) == "fused"
        assert resolve_backend("chunkwise", CUDA, head_dim) == "chunkwise"


def cuda_machine(monkeypatch: pytest.MonkeyPatch, lacking: str | None, capability: tuple[int, int]) -> None:
    """Pretend to have a CUDA device, and not to have the package `lacking`."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None if name == lacking else name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Some Card")
