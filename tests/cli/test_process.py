"""kimik3 as a process: pipes, terminals, signals, locales, noise, and what it imports."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import mk
from commandline import PROGRAM, Ran, answer, environment, error_line, refused, run, run_on_terminal
from cpu_time import cpu_seconds

ESCAPE = "\x1b"
NOISE = {"PYTHONWARNINGS": "always", "TRANSFORMERS_VERBOSITY": "debug", "HF_HUB_DISABLE_PROGRESS_BARS": "0"}
HELP_PAGES = [["--help"], *([command, "--help"] for command in ("generate", "logits", "inspect-checkpoint", "schema"))]
MOST_HELP = 2.0


def test_piped_commands_write_only_json_to_stdout(speaking: Path) -> None:
    """Whatever the libraries are asked to tell goes to stderr, and with --quiet nowhere."""
    words = ["generate", "--checkpoint", speaking, "--prompt", "é", "--max-new-tokens", "2"]
    noisy = run(*words, **NOISE, NO_COLOR="1")
    assert answer(noisy._replace(err=""))
    assert "[transformers]" in noisy.err
    assert ESCAPE not in noisy.out + noisy.err
    assert answer(run(*words, "--quiet", **NOISE, TERM="dumb")) == json.loads(noisy.out)


@pytest.mark.parametrize("variables", [{}, {"TRITON_INTERPRET": "1"}])
@pytest.mark.parametrize("words", [["generate", "--token-ids", "1"], ["logits", "--token-ids", "1"], ["bench"]])
def test_fused_without_cuda_exits_4_before_the_checkpoint_is_read(words: list[str], variables: dict[str, str]) -> None:
    """Triton's interpreter is for tests of the kernels; it does not make a machine able to serve."""
    where = ["--checkpoint", "there/is/none.pt", "--device", "cpu"]
    line = refused(run(*words, *where, "--backend", "fused", **variables), 4)
    assert line == (
        "--backend is 'fused', but the fused path needs a CUDA device and the device is 'cpu'; give chunkwise"
    )


def test_results_are_pictures_on_a_terminal(mini: Path) -> None:
    for words in (["logits", "--token-ids", "7", "--checkpoint", mini], ["inspect-checkpoint", mini]):
        ran = run_on_terminal(*words, "--quiet")
        assert (ran.code, ran.err) == (0, "")
        assert ESCAPE in ran.out
        assert "█" in ran.out
        assert "{" not in ran.out


def test_json_on_demand_on_a_terminal(mini: Path) -> None:
    assert answer(run_on_terminal("inspect-checkpoint", mini, "--json"))["path"] == str(mini)


def test_generate_on_a_terminal_shows_prompt_and_text_after_a_spinner(speaking: Path) -> None:
    words = ["generate", "--checkpoint", speaking, "--prompt", "[/] To be", "--max-new-tokens", "3", "--eos-id", "7"]
    ran = run_on_terminal(*words)
    assert ran.code == 0
    assert ran.out.startswith(f"{ESCAPE}[2m[/] To be{ESCAPE}[0m")
    assert "3 new tokens, length reached" in ran.out
    assert "loading" in ran.err
    assert ran.err.rstrip().endswith(f"{ESCAPE}[2K")  # the spinner has wiped itself away


@pytest.mark.parametrize("plain", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
@pytest.mark.parametrize("last", ["mini.pt", "--help", "--nonsense"])
def test_a_plain_terminal_gets_no_escape(mini: Path, plain: dict[str, str], last: str) -> None:
    ran = run_on_terminal("inspect-checkpoint", last, folder=mini.parent, **plain)
    assert ran.out + ran.err
    assert ESCAPE not in ran.out + ran.err


def test_errors_are_red_on_a_terminal_and_stay_on_one_line() -> None:
    path = "missing/" + "long-name/" * 20
    ran = run_on_terminal("inspect-checkpoint", path)
    assert (ran.code, ran.out) == (3, "")
    assert ran.err.startswith(f"{ESCAPE}[1;31mkimik3: error: {ESCAPE}[0m")
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize("unbuffered", [{}, {"PYTHONUNBUFFERED": "1"}])
@pytest.mark.parametrize("lines", [0, 1])
def test_a_reader_that_stops_ends_the_program_quietly(mini: Path, unbuffered: dict[str, str], lines: int) -> None:
    process = subprocess.Popen(
        [*PROGRAM, "inspect-checkpoint", "--tensors", str(mini)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(**unbuffered),
        pipesize=4096,
    )
    assert process.stdout is not None
    for _ in range(lines):
        process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    assert (process.stderr.read(), process.wait()) == (b"", 141)
    process.stderr.close()


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["schema", "logits"], ["inspect-checkpoint", "mini.pt"]])
@pytest.mark.parametrize("redirection", [">&-", "| true"])
def test_a_closed_stdout_exits_141_and_says_nothing(mini: Path, words: list[str], redirection: str) -> None:
    if redirection == "| true" and words == ["--version"]:
        words = ["logits", "--help"]  # a few bytes may arrive before the reader is gone
    script = f'trap "" PIPE; "$@" {redirection}; exit "${{PIPESTATUS[0]}}"'
    if redirection == "| true":
        script = f'{{ sleep 0.3; exec "$@"; }} {redirection}; exit "${{PIPESTATUS[0]}}"'
    done = subprocess.run(
        ["bash", "-c", script, "bash", *PROGRAM, *words], cwd=mini.parent, capture_output=True, env=environment()
    )
    assert (done.returncode, done.stdout, done.stderr) == (141, b"", b"")


def test_a_full_disk_is_an_error_in_one_line(mini: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*PROGRAM, "inspect-checkpoint", str(mini)], stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert error_line(done.stderr.decode()) == "No space left on device: stdout"


def test_a_closed_stderr_changes_nothing(mini: Path) -> None:
    script = '"$@" 2>&-'
    command = ["bash", "-c", script, "bash", *PROGRAM, "inspect-checkpoint"]
    assert answer(Ran(*_done([*command, str(mini)])))
    assert _done([*command, "missing.pt", "--debug"]) == (3, "", "")


def _done(command: list[str]) -> tuple[int, str, str]:
    done = subprocess.run(command, capture_output=True, env=environment(), text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("delay", [0.03, 0.2, 0.6])
def test_an_interrupt_ends_quietly_with_130(speaking: Path, delay: float) -> None:
    """From the first line of our code on: while importing, parsing, and waiting for standard input."""
    code = "import sys; from kimik3_cli.__main__ import run; print('ready', flush=True); sys.exit(run())"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "generate", "--checkpoint", str(speaking), "--prompt", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    try:
        process.wait(delay)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"")


@pytest.mark.parametrize("delay", [0.3, 0.6, 0.9, 1.2])
def test_an_interrupt_while_torch_is_imported(speaking: Path, delay: float) -> None:
    """Libraries swallow or wrap a KeyboardInterrupt that reaches them inside an import; the process must end anyway."""
    words = ["generate", "--checkpoint", str(speaking), "--prompt", "é" * 20, "--max-new-tokens", "300", "--no-cache"]
    process = subprocess.Popen(
        [*PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), start_new_session=True
    )
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(delay)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, b"", b"")


def test_a_long_prompt_is_refused_in_one_line(speaking: Path) -> None:
    """The tokenizer's own warning about length would be a second one."""
    ran = run("generate", "--checkpoint", speaking, "--prompt", "-", stdin=b"word " * 5000)
    assert "max_seq_len" in refused(ran, 2)


def test_json_is_utf_8_in_the_c_locale(tmp_path: Path) -> None:
    path = tmp_path / "modèle 日本 🙂.pt"
    mk(path)
    assert answer(run("inspect-checkpoint", path, LC_ALL="C"))["path"] == str(path)


def test_a_prompt_is_utf_8_even_where_the_locale_is_ascii() -> None:
    ascii_only = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    message = refused(run("generate", "--prompt", "日本", "--eos-id", "-1", **ascii_only), 2)
    assert message.startswith("--eos-id is -1")  # which is looked at after the prompt
    message = refused(run("generate", "--prompt", b"\xff", **ascii_only), 2)
    assert message == r"--prompt is '\udcff'; give valid UTF-8 text"


def test_a_file_name_that_is_not_utf_8_is_escaped(mini: Path, tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff.pt"
    Path(os.fsdecode(path)).write_bytes(mini.read_bytes())
    done = subprocess.run([*PROGRAM, "inspect-checkpoint", path], capture_output=True, env=environment())
    assert (done.returncode, done.stderr) == (0, b"")
    assert r"\udcff.pt" in json.loads(done.stdout)["path"]


def test_the_module_runs_like_the_program() -> None:
    done = subprocess.run([sys.executable, "-m", "kimik3_cli", "--version"], capture_output=True, text=True)
    assert done.stdout == run("--version").out


def imported(*words: str) -> set[str]:
    """Top-level packages in sys.modules after a command line has run."""
    code = (
        "import sys; from kimik3_cli.__main__ import run; run();"
        "print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, env=environment())
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize("words", HELP_PAGES)
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    assert not imported(*words) & {"torch", "transformers", "triton", "numpy", "pydantic", "safetensors"}


def test_inspection_needs_no_torch(mini: Path) -> None:
    assert not imported("inspect-checkpoint", "--tensors", str(mini)) & {"torch", "transformers", "numpy"}


def test_token_ids_need_no_transformers(mini: Path) -> None:
    modules = imported("generate", "--checkpoint", str(mini), "--token-ids", "7", "--max-new-tokens", "1")
    assert "torch" in modules
    assert not modules & {"transformers", "tokenizers", "huggingface_hub"}


@pytest.mark.parametrize("words", HELP_PAGES)
def test_help_costs_little_more_than_the_libraries_that_draw_it(words: list[str]) -> None:
    """CPU time beside that of importing those libraries: machines and their moments differ by a factor of two."""
    libraries = [sys.executable, "-c", "import rich.panel, rich.table, typer.rich_utils"]
    pairs = [(cpu_seconds(libraries), cpu_seconds([*PROGRAM, *words])) for _ in range(5)]
    cheapest_libraries, cheapest_help = map(min, zip(*pairs, strict=True))
    assert cheapest_help < MOST_HELP * cheapest_libraries
