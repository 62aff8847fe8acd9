"""The compiled operations are there where a compiler is, and their absence changes nothing but speed and says so."""

import shutil
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from checkpoints import checkpoint, ids, mini_config, mk
from comparison import CLEAR_ROUTING, CLOSE, assert_close, assert_matches_oracle, both_ways, load
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from oracle import oracle_run
from strategies import REPEATABLE, model_configs

from kimik3_cli.engine import generate_tokens, load_checkpoint_model, next_token_logits
from kimik3_cli.engine.benchmark.service import run_bench
from kimik3_cli.engine.native import library
from kimik3_cli.requests import BenchRequest

MISSING = "the compiled operations are missing, so the CPU is slower; install a C compiler"


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that was installed without a compiler."""
    monkeypatch.setattr(library, "library", lambda: None)


def test_a_compiler_was_enough() -> None:
    """On Linux with GNU's compiler the operations were built and share PyTorch's threads."""
    compiler = (sysconfig.get_config_var("CC") or "").split(" ")[0]
    if sys.platform == "linux" and compiler and shutil.which(compiler):
        assert library.library() is not None
        assert library.has_threads()
        assert library.why_not_native() is None


def test_operations_of_another_version_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "INTERFACE", library.INTERFACE + 1)
    assert library.library.__wrapped__() is None


def test_operations_that_were_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "MODULE", "kimik3_cli.engine.native.nothing")
    assert library.library.__wrapped__() is None


@pytest.mark.usefixtures("without")
def test_loading_says_that_they_are_missing(tmp_path: Path) -> None:
    mk(tmp_path / "mini.pt")
    with pytest.warns(UserWarning, match=MISSING):
        load_checkpoint_model(tmp_path / "mini.pt")


@pytest.mark.usefixtures("without")
def test_a_benchmark_of_random_weights_says_that_they_are_missing() -> None:
    request = BenchRequest(
        checkpoint=Path("-"), random="s-klin", prompt_tokens=[2], new_tokens=1, repeats=1, max_seq_len=64
    )
    with pytest.warns(UserWarning, match=MISSING):
        run_bench(request)


def test_nothing_is_said_when_they_are_there(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    mk(tmp_path / "mini.pt")
    load(tmp_path / "mini.pt")
    if library.library() is not None:
        assert not recwarn.list


@pytest.mark.usefixtures("without")
@pytest.mark.filterwarnings("ignore:the compiled operations")
@settings(REPEATABLE, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=model_configs(), seed=st.integers(0, 99), prefix=st.integers(1, 20))
def test_any_configuration_without_them(config: dict[str, object], seed: int, prefix: int, tmp_path: Path) -> None:
    """The float64 model's logits, and the one-token pass equals the general one, in PyTorch alone."""
    rows = ids(prefix + 3, int(str(config["vocab_size"])), seed)
    made = checkpoint(config, seed)
    assume(oracle_run(made, rows).routing_gap > CLEAR_ROUTING)
    torch.save(made, tmp_path / "model.pt")
    assert_matches_oracle(tmp_path / "model.pt", made, rows)
    assert_close(*both_ways(load(tmp_path / "model.pt"), torch.tensor([rows]), prefix))


@pytest.mark.filterwarnings("ignore:the compiled operations")
def test_the_same_with_and_without_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mk(tmp_path / "mini.pt", mini_config())
    prompt = ids(90)
    with_them = load(tmp_path / "mini.pt")
    logits, tokens = next_token_logits(with_them, prompt), generate_tokens(with_them, prompt, max_new_tokens=24)
    monkeypatch.setattr(library, "library", lambda: None)
    without_them = load(tmp_path / "mini.pt")
    assert_close(next_token_logits(without_them, prompt), logits, CLOSE)
    assert generate_tokens(without_them, prompt, max_new_tokens=24) == tokens
