"""The benchmark: named models have their sizes, floors are the arithmetic they claim, numbers are plausible."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import mk

from kimik3_cli.engine.benchmark.machine import READ_BYTES
from kimik3_cli.engine.benchmark.measure import Timing, beside_the_floor, decode_floor_seconds, prefill_floor_seconds
from kimik3_cli.engine.benchmark.random_model import named_config, random_model
from kimik3_cli.engine.benchmark.service import run_bench
from kimik3_cli.engine.checkpoint.save import save_checkpoint
from kimik3_cli.engine.checkpoint.tensors import count_parameters, tensor_specs
from kimik3_cli.errors import RequestError
from kimik3_cli.requests import BenchRequest
from kimik3_cli.results import MachineRates

# total, routed experts, embedding: counted outside this project when the sizes were chosen
SIZES = {
    "s-k3": (11_442_384, 4_128_768, 1_048_576),
    "s-klin": (11_629_008, 5_505_024, 1_048_576),
    "m-k3": (139_546_460, 38_928_384, 24_576_000),
    "m-klin": (138_617_948, 51_904_512, 24_576_000),
    "l-k3": (552_441_048, 298_844_160, 51_511_296),
    "l-klin": (570_629_976, 358_612_992, 51_511_296),
}
RATES = MachineRates(read_bytes_per_second=20e9, matrix_flops_per_second=100e9)


@pytest.mark.parametrize("name", SIZES)
def test_a_named_size_has_the_size_it_is_named_for(name: str) -> None:
    config = named_config(name)
    counts = count_parameters(config, tensor_specs(config))
    assert (counts.total, counts.parts.routed_experts, counts.parts.embedding) == SIZES[name]


def test_a_random_model_is_the_same_every_time_and_runs() -> None:
    first, second = (random_model("s-k3") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    with torch.no_grad():
        assert first(torch.tensor([[1, 2, 3]])).isfinite().all()
    decay = first.layers[0].self_attn.A_log.exp()
    assert ((decay >= 1) & (decay <= 2)).all()


def test_floors_by_hand() -> None:
    """s-klin, context 100: 6,451,664 active weights; 6 KDA layers of 4 heads x 64; 2 MLA layers of 128 + 32 numbers."""
    config = named_config("s-klin")
    fixed = 6 * (4 * 64 * 64 + 3 * 3 * 4 * 64) * 4
    per_token = 2 * (128 + 32) * 4
    assert decode_floor_seconds(config, 100, 4, RATES) == pytest.approx(
        (6_451_664 * 4 + fixed + 100 * per_token) / 20e9
    )
    assert prefill_floor_seconds(config, 512, RATES) == pytest.approx(2 * (6_451_664 - 1_048_576) * 512 / 100e9)


@pytest.mark.parametrize("no_cache", [False, True])
def test_a_checkpoint_is_measured(no_cache: bool, tmp_path: Path) -> None:
    mk(tmp_path / "mini.pt")
    request = BenchRequest.build(
        checkpoint=tmp_path / "mini.pt", prompt_tokens="7,70", new_tokens=3, repeats=2, threads=1, no_cache=no_cache
    )
    result = run_bench(request)
    printed: dict[str, Any] = json.loads(result.to_json())
    assert printed["checkpoint"] == str(tmp_path / "mini.pt")
    assert printed["random"] is None
    assert printed["cache"] is not no_cache
    assert printed["parameters"]["total"] == 56_412
    assert printed["load"]["weights_bytes"] == 56_412 * 4
    assert [run["prompt_tokens"] for run in printed["runs"]] == [7, 70]
    for run in printed["runs"]:
        for figure in (run["prefill_tokens_per_second"], run["decode_ms_per_token"]):
            assert 0 < figure["low"] <= figure["median"] <= figure["high"]
        assert 0 < run["prefill_fraction_of_floor"] < 1
        assert 0 < run["decode_fraction_of_floor"] < 1
    assert all(rate > 1e8 for rate in printed["machine"].values())


def test_figures_of_a_timing_by_hand() -> None:
    """Medians of an even number of rounds too, and the cache as it is after half of the new tokens."""
    config = named_config("s-klin")
    timing = Timing(512, 64, prefill=[0.1, 0.4, 0.2, 0.3], decode=[4e-3, 2e-3], peak_memory_bytes=7)
    run = beside_the_floor(timing, config, "fp32", RATES)
    rates = run.prefill_tokens_per_second
    assert (rates.low, rates.median, rates.high) == pytest.approx((512 / 0.4, 512 / 0.25, 512 / 0.1))
    assert run.prefill_fraction_of_floor == pytest.approx(prefill_floor_seconds(config, 512, RATES) / 0.25)
    decode = run.decode_ms_per_token
    assert (decode.low, decode.median, decode.high) == pytest.approx((2.0, 3.0, 4.0))
    assert run.decode_fraction_of_floor == pytest.approx(decode_floor_seconds(config, 512 + 32, 4, RATES) / 3e-3)
    assert run.peak_memory_bytes == 7


def test_peak_memory_is_the_models(tmp_path: Path) -> None:
    """In a process of its own: weights stay in the file until they are used, and measuring the machine comes last."""
    random_size = "s-k3"
    path = tmp_path / "small.pt"
    save_checkpoint(path, random_model(random_size))
    words = ["bench", "--checkpoint", str(path), "--prompt-tokens", "16", "--new-tokens", "2", "--repeats", "1"]
    done = subprocess.run([sys.executable, "-m", "kimik3_cli", *words], capture_output=True, check=True)
    result = json.loads(done.stdout)
    weights, growth = result["load"]["weights_bytes"], result["load"]["peak_memory_growth_bytes"]
    assert weights == SIZES[random_size][0] * 4
    assert 0 < growth < 0.5 * weights + 30e6
    assert result["runs"][0]["peak_memory_bytes"] < 900e6 < READ_BYTES


def test_lengths_that_do_not_fit_are_left_out_of_the_default_ones(tmp_path: Path) -> None:
    """Without a cache a length counts as whole chunks: 128 + 40 tokens fill 192, more than fits."""
    mk(tmp_path / "mini.pt", {"max_seq_len": 190})
    common = {"checkpoint": tmp_path / "mini.pt", "new_tokens": 40, "repeats": 1}
    assert [run.prompt_tokens for run in run_bench(BenchRequest.build(**common)).runs] == [128]
    with pytest.raises(RequestError, match=r"192"):
        run_bench(BenchRequest.build(**common, no_cache=True))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"random": "xl"}, "--random is 'xl'; give one of s-k3"),
        ({"prompt_tokens": "500", "new_tokens": 64}, "500 prompt tokens .* 64 = 564; the model's max_seq_len is 512"),
        ({"prompt_tokens": "0"}, "--prompt-tokens is '0'; give comma-separated lengths"),
        ({"repeats": 0}, "--repeats is 0; give 1 or more"),
        ({"threads": 0}, "--threads is 0; give 1 or more"),
        ({"threads": 999999999999}, "--threads is 999999999999; give at most 1024"),
        ({"random": ""}, "--random is ''; give one of s-k3"),
        ({"new_tokens": 600}, "--prompt-tokens is not given and not even 128 fits: 128 prompt tokens .* 600 = 728"),
    ],
)
def test_what_is_refused(values: dict[str, Any], said: str, tmp_path: Path) -> None:
    mk(tmp_path / "mini.pt")
    with pytest.raises(RequestError, match=said):
        run_bench(BenchRequest.build(checkpoint=tmp_path / "mini.pt", **values))
