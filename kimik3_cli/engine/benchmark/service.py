"""One benchmark request in, one result out."""

import time
from collections.abc import Callable
from typing import Literal

import torch

from kimik3_cli.engine.allocator import keep_freed_memory
from kimik3_cli.engine.benchmark.machine import peak_memory_bytes
from kimik3_cli.engine.benchmark.measure import beside_the_floor, machine_rates, time_length
from kimik3_cli.engine.benchmark.random_model import named_config, random_model
from kimik3_cli.engine.checkpoint.contents import read_contents
from kimik3_cli.engine.checkpoint.load import load_checkpoint_model
from kimik3_cli.engine.checkpoint.tensors import count_parameters, tensor_specs
from kimik3_cli.engine.config import KimiK3Config
from kimik3_cli.engine.device import check_precision, resolve_backend, resolve_device, warn_if_slow
from kimik3_cli.engine.limits import check_generation, shortened
from kimik3_cli.engine.model.decoder import KimiK3
from kimik3_cli.errors import RequestError
from kimik3_cli.requests import BenchRequest
from kimik3_cli.results import BenchResult, LoadFigures

Update = Callable[[str], None]
DEFAULT_LENGTHS = (128, 512, 2048)


def run_bench(request: BenchRequest, update: Update = lambda text: None) -> BenchResult:
    """Measure loading, prefill and decoding of one model, then the machine that it ran on.

    The machine comes last, because measuring it takes more memory than most models and would hide what they take.

    Args:
        request: what to measure.
        update: is told in a few words what is going on.

    Raises:
        RequestError, DeviceError, CheckpointError: before anything is measured, but for damaged weights.
        NonFiniteError: the model's logits are not finite.
    """
    keep_freed_memory()
    device = resolve_device(request.device)
    check_precision(device, request.precision)
    resolve_backend(request.backend, device)
    config = _config(request)
    backend = resolve_backend(request.backend, device, config.linear_attn_config.head_dim)
    config = config.with_backend(backend)
    lengths = _lengths(request, config)
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    update("loading the model")
    model, load = _model(request, device, backend)
    use_cache, precision = not request.no_cache, request.precision
    timings = []
    for length in lengths:
        update(f"running {length} prompt tokens")
        timings.append(time_length(model, length, request.new_tokens, request.repeats, use_cache, precision))
    update("measuring the machine")
    rates = machine_rates(device)
    return BenchResult(
        checkpoint=None if request.random is not None else str(request.checkpoint),
        random=request.random,
        device=str(device),
        backend=backend,
        precision=request.precision,
        threads=torch.get_num_threads(),
        cache=not request.no_cache,
        repeats=request.repeats,
        parameters=count_parameters(config, tensor_specs(config)),
        machine=rates,
        load=load,
        runs=[beside_the_floor(timing, config, request.precision, rates) for timing in timings],
    )


def _config(request: BenchRequest) -> KimiK3Config:
    config = named_config(request.random) if request.random is not None else read_contents(request.checkpoint).config
    return shortened(config, request.max_seq_len)


def _lengths(request: BenchRequest, config: KimiK3Config) -> list[int]:
    """Prompt lengths to run: those asked for, which must fit, else those of the default that fit."""

    def check(length: int) -> None:
        prompt = [0] * length
        check_generation(config, prompt, request.new_tokens, use_cache=not request.no_cache)

    if request.prompt_tokens is not None:
        for length in request.prompt_tokens:
            check(length)
        return request.prompt_tokens
    fitting = []
    for length in DEFAULT_LENGTHS:
        try:
            check(length)
            fitting.append(length)
        except RequestError as error:
            if not fitting:
                raise RequestError(f"--prompt-tokens is not given and not even {length} fits: {error}") from None
    return fitting


def _model(
    request: BenchRequest, device: torch.device, backend: Literal["chunkwise", "fused"]
) -> tuple[KimiK3, LoadFigures | None]:
    if request.random is not None:
        warn_if_slow(device)
        return random_model(request.random, device, backend), None
    before = peak_memory_bytes(device)
    start = time.perf_counter()
    model, _ = load_checkpoint_model(request.checkpoint, device, backend, precision=request.precision)
    seconds = time.perf_counter() - start
    weights = sum(parameter.nbytes for parameter in model.parameters())
    growth = peak_memory_bytes(device) - before
    return model, LoadFigures(seconds=seconds, weights_bytes=weights, peak_memory_growth_bytes=growth)
