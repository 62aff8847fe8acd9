"""The GPU benchmark's floors, stages and report, on the CPU with tiny sizes: it must work on the day a GPU is there."""

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import bench_gpu
import fused_cases
import pytest
import torch
import triton_interpreter  # noqa: F401  (prepares the interpreter)
from bench_gpu import Workload
from fused_cases import DecodeCase, PrefillCase
from torch import Tensor

from kimik3_cli.engine.benchmark import machine
from kimik3_cli.engine.kda.fused import prefill

CPU = torch.device("cpu")
TINY = Workload(
    cases=(PrefillCase(17, (16, 16)), PrefillCase(5, (24, 17), "mixed anywhere", dtype=torch.bfloat16)),
    decode_cases=(DecodeCase(2, 2, 16), DecodeCase(1, 1, 24, taps=1, lower_bound=None, dtype=torch.bfloat16)),
    copy_bytes=1 << 16,
    cold_bytes=1 << 13,
    repeats=2,
    prefills=((1, 3, 1, 16),),
    decodes=((1, 2, 16),),
    model="s-k3",
    prompt=4,
    new=2,
)


@pytest.fixture(autouse=True)
def _small_and_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "READ_BYTES", 1 << 20)


def bytes_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_floors_count_the_tensors() -> None:
    batch, _, heads, size = shape = (2, 17, 1, 24)
    raw = fused_cases.fresh_prefill(*shape, device=CPU, dtype=torch.bfloat16)
    outputs = prefill.kda_fused(*raw)
    assert bench_gpu.prefill_bytes(*shape, activation=2) == bytes_of([*raw[:5], raw.initial_state, *outputs])
    space = prefill._workspace(batch * heads * 2, 32, CPU)
    assert bench_gpu.workspace_bytes(*shape) == bytes_of(space)
    *_, tail, memory = fused_cases.fresh_decode(batch, heads, size, bench_gpu.TAPS, device=CPU)
    assert bench_gpu.decode_bytes(batch, heads, size) == 2 * bytes_of([tail, memory])


def test_operations_grow_with_every_size() -> None:
    shape = (1, 64, 2, 32)
    once = bench_gpu.prefill_flops(*shape)
    for position in range(3):
        doubled = [2 * size if number == position else size for number, size in enumerate(shape)]
        assert bench_gpu.prefill_flops(*doubled) == 2 * once
    # the walk's products with the state alone: three of [16,K] by [K,K] a chunk
    assert once > 2 * 3 * 64 * 2 * 32 * 32


@pytest.mark.parametrize("stage", bench_gpu.STAGES)
def test_every_stage_runs(stage: str) -> None:
    run, _ = bench_gpu.STAGES[stage]
    with torch.inference_mode():
        figures = list(run(CPU, TINY))
    assert figures
    for figure in figures:
        assert json.loads(json.dumps(figure)) == figure
        assert isinstance(figure["what"], str)
        assert all(value > 0 for name, value in figure.items() if name.endswith(("_ms", "_s")) or name == "ms")
    if stage == "correctness":
        assert len(figures) == 4
        assert all(0 < figure["error"] <= 2e-5 for figure in figures)


def test_fla_runs_when_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def chunk_kda(*, A_log: Tensor, dt_bias: Tensor, lower_bound: float, **named: Any) -> tuple[Tensor, Tensor]:
        assert all(named[name] for name in named if name.startswith("use_"))
        inputs = [named[name] for name in ("q", "k", "v", "g", "beta")]
        return prefill.kda_fused(*inputs, A_log, dt_bias, named["initial_state"], lower_bound)

    for name in ("fla", "fla.ops", "fla.ops.kda"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["fla.ops.kda"].chunk_kda = chunk_kda  # type: ignore[attr-defined]
    (figure,) = bench_gpu.measure_fla(CPU, TINY)
    assert figure["differs_by"] == 0
    assert figure["ms"] > 0


def test_a_wrong_kernel_fails_the_correctness_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        o, state = prefill.kda_fused(*args, **options)
        return o * 1.001, state

    monkeypatch.setattr(fused_cases, "kda_fused", off)
    with pytest.raises(AssertionError, match=r"with seed \d+: relative error"):
        list(bench_gpu.check_correctness(CPU, TINY))


def test_a_kernel_that_varies_fails_the_correctness_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    def varying(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        o, state = prefill.kda_fused(*args, **options)
        return o + 1e-7 * torch.rand(()), state

    monkeypatch.setattr(fused_cases, "kda_fused", varying)
    with pytest.raises(AssertionError, match="repeats differ"):
        list(bench_gpu.check_correctness(CPU, TINY))


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_a_stage_is_reported_however_it_ends() -> None:
    line = """print('{"what": "one", "ms": 1.5}', flush=True)"""
    good = bench_gpu.run_stage("good", python(f"print('noise'); {line}"), 60)
    assert (good["ok"], good["error"], good["figures"]) == (True, None, [{"what": "one", "ms": 1.5}])
    bad = bench_gpu.run_stage("bad", python(f"{line}; raise ValueError('broken here')"), 60)
    assert (bad["ok"], bad["error"]) == (False, "ValueError: broken here")
    slow = bench_gpu.run_stage("slow", python(f"{line}; import time; time.sleep(60)"), 2)
    assert (slow["ok"], slow["error"]) == (False, "took longer than 2 s")
    assert good["figures"] == bad["figures"] == slow["figures"]
    report = bench_gpu.table([good, bad, slow]).splitlines()
    assert [line.split()[0] for line in report] == ["good", "one", "bad", "one", "ValueError:", "slow", "one", "took"]
    assert [line.endswith("FAILED") for line in report].count(True) == 2


def test_all_limits_together_are_under_six_minutes() -> None:
    assert sum(limit for _, limit in bench_gpu.STAGES.values()) < 360


def test_without_cuda_one_line_and_exit_code_4(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_gpu.main([]) == 4
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "no CUDA device is available here" in err


def test_the_run_writes_every_stage_and_fails_when_one_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Here a stage's process finds no CUDA device, and says so."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(bench_gpu, "STAGES", {"machine": bench_gpu.STAGES["machine"]})
    assert bench_gpu.main([str(tmp_path / "figures.json")]) == 1
    (stage,) = json.loads((tmp_path / "figures.json").read_text())["stages"]
    assert (stage["stage"], stage["ok"], stage["figures"]) == ("machine", False, [])
    assert "no CUDA device is available here" in stage["error"]
    assert "FAILED" in capsys.readouterr().out
