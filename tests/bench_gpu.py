"""Correctness and speed of the fused path on one CUDA device, in one run of a few minutes.

    python tests/bench_gpu.py [FILE.json]

Each stage is a process of its own with a time limit, so a stage that fails or hangs is reported and the others still
run. All figures go to FILE.json (bench-gpu.json unless named) and to a table on stdout; the exit code is 1 when a stage
failed. Times are medians of repeats between CUDA events.

Letters: B batch, T tokens, H heads, K head size (keys and values alike), c convolution kernel.
"""

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fused_cases import (
    CASES,
    DECODE_CASES,
    DecodeCase,
    PrefillCase,
    decode_error,
    fresh_decode,
    fresh_prefill,
    prefill_error,
)
from kda.fused.raw_inputs import Raw
from torch import Tensor

from kimik3_cli.engine.benchmark.machine import median_seconds
from kimik3_cli.engine.benchmark.measure import beside_the_floor, machine_rates, time_length
from kimik3_cli.engine.benchmark.random_model import random_model
from kimik3_cli.engine.kda.fused.launch import CHUNK, Precision, padded

Figure = dict[str, Any]
"""One line of the table: "what", and named numbers; a name that ends in _ms is a time."""
Stage = Callable[..., Iterator[Figure]]
"""From a device and a workload, which is the whole one unless given."""
REPEATS = 20
COPY_BYTES = 1 << 30
PREFILLS = ((1, 8192, 96, 128), (2, 16384, 16, 128))  # B, T, H, K
DECODES = ((1, 96, 128), (8, 96, 128), (64, 96, 128))  # B, H, K
TAPS = 4
COLD_BYTES = 1 << 30  # states that are walked through before one is met again, so that no cache holds it
MODEL, PROMPT, NEW = "m-k3", 2048, 64


class Workload(NamedTuple):
    """What is checked and measured; a test on the CPU takes less."""

    cases: tuple[PrefillCase, ...] = CASES
    decode_cases: tuple[DecodeCase, ...] = DECODE_CASES

    copy_bytes: int = COPY_BYTES
    cold_bytes: int = COLD_BYTES
    repeats: int = REPEATS
    prefills: tuple[tuple[int, int, int, int], ...] = PREFILLS
    decodes: tuple[tuple[int, int, int], ...] = DECODES
    model: str = MODEL
    prompt: int = PROMPT
    new: int = NEW


WHOLE = Workload()


# --- floors: what has to be moved and computed at least ---


def prefill_bytes(batch: int, time: int, heads: int, size: int, activation: int) -> int:
    """Read q, k, v, z, beta and the first state once, write o and the last state once."""
    token = 4 * size * activation + activation + 4 * size
    return batch * heads * (time * token + 2 * 4 * size * size)


def workspace_bytes(batch: int, time: int, heads: int, size: int) -> int:
    """What `chunk_local` writes and `chunk_walk` reads."""
    chunk = 3 * CHUNK * padded(size) + 2 * CHUNK * CHUNK + padded(size)
    return 4 * batch * heads * -(-time // CHUNK) * chunk


def decode_bytes(batch: int, heads: int, size: int) -> int:
    """Read and write the state and the convolution's history once; the token's own vectors are left out."""
    return batch * heads * 2 * 4 * (size * size + 3 * (TAPS - 1) * size)


def prefill_flops(batch: int, time: int, heads: int, size: int) -> int:
    """Operations of both kernels, a multiply-add counting 2; a product in tf32x3 counts once."""
    local = 5 * CHUNK * size + 2 * CHUNK * CHUNK
    walk = 6 * size * size + 4 * CHUNK * size
    return batch * time * heads * (local + walk)


# --- clocks ---


def milliseconds(work: Callable[[], object], device: torch.device, repeats: int) -> Figure:
    """Time `work` after one warm-up: median, lowest and highest of `repeats`."""
    work()
    times = [_once(work, device) for _ in range(repeats)]
    return {"ms": statistics.median(times), "low_ms": min(times), "high_ms": max(times)}


def _once(work: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) * 1e3
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    work()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after))


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Bytes a second of a copy, each byte read and each written counting one."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / median_seconds(lambda: target.copy_(source), device)


def beside_floor(figure: Figure, moved: int, bandwidth: float) -> Figure:
    """Add the time that moving so many bytes takes at best, and which part of the measured time that is."""
    floor = moved / bandwidth * 1e3
    return figure | {"floor_ms": floor, "of_floor": floor / figure["ms"]}


# --- stages ---


def measure_machine(device: torch.device, workload: Workload = WHOLE) -> Iterator[Figure]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    yield {"what": "device", "name": name, "copy_gb_s": copy_bandwidth(device, workload.copy_bytes) / 1e9}
    yield {"what": "versions", "python": platform.python_version(), "cuda": torch.version.cuda, **versions()}


def versions() -> dict[str, str]:
    found = {}
    for package in ("torch", "triton", "flash-linear-attention"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "-"
    return found


def check_correctness(device: torch.device, workload: Workload = WHOLE) -> Iterator[Figure]:
    """Largest relative error against the float64 recurrence, inputs new at every run; repeats agree bit for bit."""
    seed = time.time_ns() % 2**31
    for number, case in enumerate(workload.cases):
        yield prefill_error(case, device, seed + number, workload.repeats)
    for number, decode_case in enumerate(workload.decode_cases):
        yield decode_error(decode_case, device, seed + number, workload.repeats)


def measure_prefill(device: torch.device, workload: Workload = WHOLE) -> Iterator[Figure]:
    from kimik3_cli.engine.kda.fused.prefill import kda_fused

    bandwidth = copy_bandwidth(device, workload.copy_bytes)
    precisions: tuple[Precision, ...] = ("tf32x3", "tf32")
    for shape in workload.prefills:
        inputs = fresh_prefill(*shape, device=device, dtype=torch.bfloat16)
        moved, space = prefill_bytes(*shape, activation=2), workspace_bytes(*shape)
        for precision in precisions:
            figure = milliseconds(
                lambda inputs=inputs, precision=precision: kda_fused(*inputs, input_precision=precision),
                device,
                workload.repeats,
            )
            figure |= {"with_workspace_ms": (moved + 2 * space) / bandwidth * 1e3}
            figure |= {"tflops": prefill_flops(*shape) / figure["ms"] / 1e9}
            yield {"what": f"B,T,H,K={shape} bf16 {precision}"} | beside_floor(figure, moved, bandwidth)


def measure_fla(device: torch.device, workload: Workload = WHOLE) -> Iterator[Figure]:
    """The same shapes through chunk_kda of flash-linear-attention, when it is installed."""
    if find_spec("fla") is None:
        yield {"what": "flash-linear-attention is not installed"}
        return
    from kimik3_cli.engine.kda.fused.prefill import kda_fused

    for shape in workload.prefills:
        raw = fresh_prefill(*shape, device=device, dtype=torch.bfloat16)
        ours, theirs = kda_fused(*raw)[0], chunk_kda_of_fla(raw)[0].float()
        difference = ((theirs - ours).abs().max() / ours.abs().max()).item()
        figure = milliseconds(lambda raw=raw: chunk_kda_of_fla(raw), device, workload.repeats)
        yield {"what": f"chunk_kda B,T,H,K={shape} bf16", "differs_by": difference} | figure


def chunk_kda_of_fla(raw: Raw) -> tuple[Tensor, Tensor]:
    """The function of `kda_fused`, from flash-linear-attention."""
    from fla.ops.kda import chunk_kda

    output: tuple[Tensor, Tensor] = chunk_kda(
        q=raw.q,
        k=raw.k,
        v=raw.v,
        g=raw.z,
        beta=raw.beta_logits,
        A_log=raw.a_log,
        dt_bias=raw.dt_bias,
        initial_state=raw.initial_state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=True,
        lower_bound=raw.lower_bound,
    )
    return output


def measure_decode(device: torch.device, workload: Workload = WHOLE) -> Iterator[Figure]:
    """One launch a layer, eager and replayed from a CUDA graph; layers take turns so that no cache holds a state."""
    from kimik3_cli.engine.kda.fused.decode import kda_decode_fused

    bandwidth = copy_bandwidth(device, workload.copy_bytes)
    for batch, heads, size in workload.decodes:
        moved = decode_bytes(batch, heads, size)
        layers = max(1, workload.cold_bytes // moved)
        inputs = [fresh_decode(batch, heads, size, TAPS, device=device) for _ in range(min(layers, 256))]

        def every_layer(inputs: list[tuple[Any, ...]] = inputs) -> list[Tensor]:
            return [kda_decode_fused(*each) for each in inputs]

        for way, run in (("eager", every_layer), ("graph", captured(every_layer, device))):
            total = milliseconds(run, device, workload.repeats)
            figure = {name: value / len(inputs) for name, value in total.items()}
            yield {"what": f"B,H,K={(batch, heads, size)} {way}"} | beside_floor(figure, moved, bandwidth)


def check_graph(device: torch.device, workload: Workload = WHOLE) -> Iterator[Figure]:
    """A replayed launch gives bit for bit what an eager one gives."""
    from kimik3_cli.engine.kda.fused.decode import kda_decode_fused

    for batch, heads, size in workload.decodes:
        inputs = fresh_decode(batch, heads, size, TAPS, device=device)
        tail, memory = inputs[-2:]
        before = [tail.clone(), memory.clone()]
        eager = [kda_decode_fused(*inputs), tail.clone(), memory.clone()]
        replay = captured(lambda inputs=inputs: kda_decode_fused(*inputs), device)
        tail.copy_(before[0])
        memory.copy_(before[1])
        replayed = [replay(), tail, memory]
        same = all(torch.equal(a, b) for a, b in zip(eager, replayed, strict=True))
        assert same, f"the graph differs at B,H,K={(batch, heads, size)}"
        yield {"what": f"B,H,K={(batch, heads, size)}", "bit for bit": same}


def captured(work: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """Return a replay of `work` as a CUDA graph; on the CPU, `work`."""
    if device.type != "cuda":
        return work
    work()  # compiles
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def measure_model(device: torch.device, workload: Workload = WHOLE) -> Iterator[Figure]:
    """Tokens a second of a random model, end to end, with both backends."""
    rates = machine_rates(device)
    for backend in ("chunkwise", "fused") if device.type == "cuda" else ("chunkwise",):
        model = random_model(workload.model, device, backend)  # type: ignore[arg-type]
        with torch.inference_mode():
            timing = time_length(model, workload.prompt, workload.new, 3, use_cache=True, precision="fp32")
        run = beside_the_floor(timing, model.config, "fp32", rates)
        yield {
            "what": f"{workload.model} {backend} fp32, {workload.prompt} + {workload.new} tokens",
            "prefill_tokens_s": run.prefill_tokens_per_second.median,
            "decode_ms": run.decode_ms_per_token.median,
            "decode_tokens_s": 1e3 / run.decode_ms_per_token.median,
        }


# seconds that each stage may take, with all that it compiles; together under 6 minutes
STAGES: dict[str, tuple[Stage, int]] = {
    "machine": (measure_machine, 20),
    "correctness": (check_correctness, 120),
    "prefill": (measure_prefill, 45),
    "fla": (measure_fla, 60),
    "decode": (measure_decode, 30),
    "graph": (check_graph, 20),
    "model": (measure_model, 55),
}


# --- the run ---


def run_stage(name: str, command: list[str], limit: float) -> dict[str, Any]:
    """Run one stage as a process that prints its figures as JSON, a line each."""
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
        error = None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]
        output = done.stdout
    except subprocess.TimeoutExpired as expired:
        error = f"took longer than {limit:g} s"
        output = (expired.stdout or b"").decode() if isinstance(expired.stdout, bytes | None) else expired.stdout
    figures = [json.loads(line) for line in output.splitlines() if line.startswith("{") and line.endswith("}")]
    seconds = time.perf_counter() - start
    return {"stage": name, "ok": error is None, "error": error, "seconds": seconds, "figures": figures}


def table(results: list[dict[str, Any]]) -> str:
    """One line a figure, and one for each stage that failed."""
    lines = []
    for result in results:
        lines.append(f"{result['stage']} ({result['seconds']:.0f} s){'' if result['ok'] else ' FAILED'}")
        for figure in result["figures"]:
            numbers = (f"{name} {_short(value)}" for name, value in figure.items() if name != "what")
            lines.append(f"    {figure['what']:<44} {'  '.join(numbers)}")
        if not result["ok"]:
            lines.append(f"    {result['error']}")
    return "\n".join(lines)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(words: list[str]) -> int:
    if not torch.cuda.is_available():
        print("bench_gpu: no CUDA device is available here; run it where torch.cuda.is_available()", file=sys.stderr)
        return 4
    if words[:1] == ["--stage"]:
        with torch.inference_mode():
            for figure in STAGES[words[1]][0](torch.device("cuda")):
                print(json.dumps(figure), flush=True)
        return 0
    path = Path(words[0] if words else "bench-gpu.json")
    results = []
    for name, (_, limit) in STAGES.items():
        results.append(run_stage(name, [sys.executable, __file__, "--stage", name], limit))
        print(table(results[-1:]), flush=True)
    record = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "stages": results}
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"written to {path}")
    return 0 if all(result["ok"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
