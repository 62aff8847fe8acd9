"""Measure loading, prefill and decoding of one model, and set each beside the floor that the machine allows."""

import statistics
import time
from dataclasses import dataclass

import torch

from kimik3_cli.engine.benchmark.machine import matrix_rate, peak_memory_bytes, read_bandwidth, synchronise
from kimik3_cli.engine.cache import DecodeCache
from kimik3_cli.engine.checkpoint.tensors import count_parameters, tensor_specs
from kimik3_cli.engine.config import KimiK3Config
from kimik3_cli.engine.generation import advance, next_token_logits
from kimik3_cli.engine.model.decoder import KimiK3
from kimik3_cli.results import BenchRun, MachineRates, Spread


def machine_rates(device: torch.device) -> MachineRates:
    """Measure the two rates that bound every model on this device at the current thread count."""
    return MachineRates(read_bytes_per_second=read_bandwidth(device), matrix_flops_per_second=matrix_rate(device))


def decode_floor_seconds(config: KimiK3Config, context: int, weight_bytes: int, rates: MachineRates) -> float:
    """Time to read the active weights and the cache of `context` tokens once: no decoder of one sequence is faster."""
    active = count_parameters(config, tensor_specs(config)).active
    cache = config.cache_bytes_fixed() + context * config.cache_bytes_per_token()
    return (active * weight_bytes + cache) / rates.read_bytes_per_second


def prefill_floor_seconds(config: KimiK3Config, tokens: int, rates: MachineRates) -> float:
    """Time of the matrix products of `tokens` tokens, 2 operations a weight; the head, needed once, is not counted."""
    active = count_parameters(config, tensor_specs(config)).active - config.vocab_size * config.hidden_size
    return 2 * active * tokens / rates.matrix_flops_per_second


@dataclass(frozen=True)
class Timing:
    """What rounds of one prompt length took: seconds of each prefill, seconds a token of each decoding."""

    prompt_tokens: int
    new_tokens: int
    prefill: list[float]
    decode: list[float]
    peak_memory_bytes: int


def time_length(
    model: KimiK3, prompt_tokens: int, new_tokens: int, repeats: int, use_cache: bool, precision: str
) -> Timing:
    """Time prefill of `prompt_tokens` random ids and decoding of `new_tokens` after them, `repeats` times each.

    One untimed round comes first. Without a cache every new token recomputes the whole prefix.
    """
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(model.config.vocab_size, (prompt_tokens,), generator=generator).tolist()
    rounds = [_one_round(model, prompt, new_tokens, use_cache, precision) for _ in range(repeats + 1)][1:]
    prefill, decode = (list(seconds) for seconds in zip(*rounds, strict=True))
    return Timing(prompt_tokens, new_tokens, prefill, decode, peak_memory_bytes(model.device))


def beside_the_floor(timing: Timing, config: KimiK3Config, precision: str, rates: MachineRates) -> BenchRun:
    """Set the medians of a timing beside the floors; the cache counts as it is after half of the new tokens."""
    weight_bytes = 2 if precision == "bf16" else 4
    context = timing.prompt_tokens + timing.new_tokens // 2
    prefill, decode = _spread(timing.prefill), _spread(timing.decode)
    tokens = timing.prompt_tokens
    return BenchRun(
        prompt_tokens=tokens,
        new_tokens=timing.new_tokens,
        prefill_tokens_per_second=Spread(
            median=tokens / prefill.median, low=tokens / prefill.high, high=tokens / prefill.low
        ),
        prefill_fraction_of_floor=prefill_floor_seconds(config, tokens, rates) / prefill.median,
        decode_ms_per_token=Spread(median=decode.median * 1e3, low=decode.low * 1e3, high=decode.high * 1e3),
        decode_fraction_of_floor=decode_floor_seconds(config, context, weight_bytes, rates) / decode.median,
        peak_memory_bytes=timing.peak_memory_bytes,
    )


def _one_round(
    model: KimiK3, prompt: list[int], new_tokens: int, use_cache: bool, precision: str
) -> tuple[float, float]:
    """Seconds of one prefill, and seconds a token of decoding."""
    start = time.perf_counter()
    cache = DecodeCache(model.config, 1, len(prompt) + new_tokens, model.device) if use_cache else None

    def step(ids: list[int], fresh: list[int]) -> int:
        if cache is None:
            return int(next_token_logits(model, ids, precision=precision).argmax())
        return int(advance(model, fresh, cache, precision=precision).argmax())

    token = step(prompt, prompt)
    synchronise(model.device)
    prefilled = time.perf_counter()
    ids = prompt
    for _ in range(new_tokens):
        ids = [*ids, token]
        token = step(ids, [token])
    synchronise(model.device)
    return prefilled - start, (time.perf_counter() - prefilled) / new_tokens


def _spread(values: list[float]) -> Spread:
    return Spread(median=statistics.median(values), low=min(values), high=max(values))
