"""Flags, help pages, exit codes and the one line that a failure writes."""

import errno
import json
import os
from pathlib import Path

import pytest
from commandline import Ran, refused
from conftest import Call

import kimik3_cli
from kimik3_cli.cli import options
from kimik3_cli.engine import service
from kimik3_cli.errors import CheckpointError, DeviceError, NonFiniteError, TokenizerError
from kimik3_cli.requests import BenchRequest, GenerateRequest, LogitsRequest

COMMANDS = ("generate", "logits", "inspect-checkpoint", "bench", "convert", "schema")
IDS = ("generate", "--token-ids", "7,13")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generte"], "No such command 'generte'"),
        (["generate", "--promt", "x"], "No such option: --promt"),
        (["generate", "--prompt"], "Option '--prompt' requires an argument"),
        (["generate", "stray", "--token-ids", "1"], "Got unexpected extra argument"),
        (["inspect-checkpoint"], "Missing argument 'PATH'"),
        (["inspect-checkpoint", "--json=yes", "x.pt"], "Option '--json' does not take a value"),
        (["inspect-checkpoint", ""], "PATH is ''; give the name of a file"),
        (["schema", "everything"], "NAME is 'everything'; give generate, stream, logits, inspect, bench"),
        (["generate"], "neither of --prompt and --token-ids given; give exactly one"),
        (["logits"], "neither of --prompt and --token-ids given; give exactly one"),
        (["generate", "--prompt", "x", "--token-ids", "1"], "both of --prompt and --token-ids given"),
        (["generate", "--prompt", ""], "--prompt is ''; give at least one character"),
        (["generate", "--token-ids", "1,x"], "--token-ids holds 'x'"),
        ([*IDS, "--max-new-tokens", "0"], "--max-new-tokens is 0; give 1 or more"),
        ([*IDS, "--mode", "sample", "--top-k", "-1"], "--top-k is -1; give 1 or more"),
        ([*IDS, "--mode", "sample", "--top-p", "1.5"], "--top-p is 1.5; give a value above 0 and at most 1"),
        ([*IDS, "--mode", "sample", "--temperature", "nan"], "--temperature is nan; give a finite value above 0"),
        ([*IDS, "--device", "gpu"], "--device is 'gpu'; give auto, cpu, cuda or cuda:N"),
        ([*IDS, "--precision", "fp16"], "--precision is 'fp16'; give fp32 or bf16"),
        ([*IDS, "--checkpoint", ""], "--checkpoint is ''; give the name of a file"),
        (["logits", "--token-ids", "1", "--top", "0"], "--top is 0; give 1 or more"),
        (["logits", "--token-ids", "1", "--output", "x.txt"], "--output is 'x.txt'; give a name that ends in"),
    ],
)
def test_wrong_requests_exit_2_before_any_checkpoint_is_read(
    kimik3: Call, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.setenv("KIMIK3_CHECKPOINT", "there/is/none.pt")
    assert refused(kimik3(*words), 2).startswith(message)


@pytest.mark.parametrize(
    "words",
    [
        ["--device", "cuda"],
        ["--device", "cuda:0"],
        ["--device", "cuda:99"],
        ["--device", "cpu", "--backend", "fused"],
        ["--device", "cpu", "--precision", "bf16"],
    ],
)
@pytest.mark.parametrize("command", ["generate", "logits"])
def test_unavailable_devices_exit_4_before_the_checkpoint_is_read(
    kimik3: Call, monkeypatch: pytest.MonkeyPatch, command: str, words: list[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    message = refused(kimik3(command, "--token-ids", "1", "--checkpoint", "there/is/none.pt", *words), 4)
    assert message.startswith(f"{words[-2]} is '{words[-1]}', but ")
    assert "; give " in message


@pytest.mark.parametrize("command", ["generate", "logits"])
def test_a_missing_checkpoint_exits_3(kimik3: Call, command: str) -> None:
    assert "none.pt does not exist" in refused(kimik3(command, "--token-ids", "1", "--checkpoint", "none.pt"), 3)
    assert "none.pt does not exist" in refused(kimik3("inspect-checkpoint", "none.pt"), 3)


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["generate", "--promt", "x", "--json"], "usage"),
        (["--json", "generate", "--promt", "x"], "usage"),
        (["generate", "--json"], "request"),
        (["inspect-checkpoint", "none.pt", "--json"], "checkpoint"),
        (["nonsense", "--json"], "usage"),
    ],
)
def test_with_json_the_error_is_json(kimik3: Call, words: list[str], kind: str) -> None:
    ran = kimik3(*words)
    assert ran.code in (2, 3)
    assert ran.out == ""
    error = json.loads(ran.err.splitlines()[-1])
    assert list(error) == ["error"]
    assert list(error["error"]) == ["kind", "message"]
    assert error["error"]["kind"] == kind


def test_json_as_the_value_of_an_option_is_a_value(kimik3: Call) -> None:
    """`--prompt --json` is a prompt; nobody asked for JSON errors."""
    assert "none.pt" in refused(kimik3("generate", "--prompt", "--json", "--checkpoint", "none.pt"), 3)
    assert "none.pt" in refused(kimik3("generate", "--prompt=--json", "--checkpoint", "none.pt"), 3)


@pytest.mark.parametrize(
    ("words", "switches", "rest"),
    [
        (["--json", "generate"], options.Switches(json=True), ["generate"]),
        (["generate", "--quiet", "--debug"], options.Switches(debug=True, quiet=True), ["generate"]),
        (["generate", "--prompt", "--json"], options.Switches(), ["generate", "--prompt", "--json"]),
        (["generate", "--prompt=--json"], options.Switches(), ["generate", "--prompt=--json"]),
        (["logits", "--full", "--json"], options.Switches(json=True), ["logits", "--full"]),
        (["logits", "--local-files-only", "--json"], options.Switches(json=True), ["logits", "--local-files-only"]),
        (["inspect-checkpoint", "--", "--json"], options.Switches(), ["inspect-checkpoint", "--", "--json"]),
        (["generate", "--tokenizer", "--quiet", "--quiet"], options.Switches(quiet=True), None),
        (["generate", "--prompt"], options.Switches(), ["generate", "--prompt"]),
    ],
)
def test_switches_are_found_anywhere(words: list[str], switches: options.Switches, rest: list[str] | None) -> None:
    found, left = options.take_switches(words)
    assert found == switches
    assert left == (["generate", "--tokenizer", "--quiet"] if rest is None else rest)


@pytest.mark.parametrize("words", [[], ["--help"], *([command, "--help"] for command in COMMANDS)])
def test_help_goes_to_stdout_and_exits_0(kimik3: Call, words: list[str]) -> None:
    ran = kimik3(*words)
    assert (ran.code, ran.err) == (0, "")
    assert "Usage: kimik3 " in ran.out


def test_no_command_is_help(kimik3: Call) -> None:
    assert kimik3().out == kimik3("--help").out
    assert all(command in kimik3().out for command in COMMANDS)


def test_version(kimik3: Call) -> None:
    assert kimik3("--version") == Ran(0, f"kimik3 {kimik3_cli.__version__}\n", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_one_line_at_80_columns(kimik3: Call, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    page = kimik3(command, "--help").out
    rows = [line for line in page.splitlines() if line.startswith("│")]
    assert rows
    assert all(row.startswith(("│ --", "│ *    ")) for row in rows)
    examples = page.partition("Examples")[2]
    assert examples.count(f" kimik3 {command} ") == 2


def test_help_panels(kimik3: Call) -> None:
    page = kimik3("generate", "--help").out
    titles = [line.split()[1] for line in page.splitlines() if line.startswith("╭─")]
    assert titles == ["Model", "Prompt", "Sampling", "Output"]


@pytest.mark.parametrize(
    ("request_type", "parameters"),
    [
        (GenerateRequest, [*options.MODEL, *options.PROMPT, *options.SAMPLING, *options.GENERATE]),
        (LogitsRequest, [*options.MODEL, *options.PROMPT, *options.LOGITS]),
        (BenchRequest, [*options.BENCH]),
    ],
)
def test_the_defaults_that_help_shows_are_those_of_the_request(request_type: type, parameters: list) -> None:
    fields = request_type.model_fields
    assert {parameter.name for parameter in parameters} - {"stream"} == set(fields)
    for parameter in parameters:
        if parameter.name not in ("checkpoint", "stream"):
            default = fields[parameter.name].default
            assert parameter.default == (default if default is None or default is False else str(default))


def test_the_default_checkpoint_is_the_bundled_one(kimik3: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def remember(request: GenerateRequest, update: object) -> None:
        asked.append(request.checkpoint)
        raise CheckpointError("enough")

    monkeypatch.setattr(service, "run_generate", remember)
    kimik3(*IDS)
    monkeypatch.setenv("KIMIK3_CHECKPOINT", "")
    kimik3(*IDS)
    monkeypatch.setenv("KIMIK3_CHECKPOINT", "variable.pt")
    kimik3(*IDS)
    kimik3(*IDS, "--checkpoint", "flag.pt")
    bundled = Path(kimik3_cli.__file__).parent / "assets" / "demo.pt"
    assert asked == [bundled, bundled, Path("variable.pt"), Path("flag.pt")]


@pytest.mark.parametrize(
    ("error", "code", "kind", "message"),
    [
        (CheckpointError("a.pt is cut\noff;  give\r\n\nanother"), 3, "checkpoint", "a.pt is cut off;  give another"),
        (CheckpointError("\x1b[31mred\x1b[0m \x00"), 3, "checkpoint", "\\x1b[31mred\\x1b[0m \\x00"),
        (TokenizerError("t"), 3, "tokenizer", "t"),
        (DeviceError("d"), 4, "device", "d"),
        (NonFiniteError("n"), 1, "non_finite", "n"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x.npy"), 1, "os", "No space left on device: x.npy"),
        (OSError("odd"), 1, "os", "odd"),
        (MemoryError(), 1, "memory", "out of memory; take a smaller model or a machine with more"),
        (ZeroDivisionError("by 0\nhere"), 1, "unexpected", "ZeroDivisionError: by 0 here; --debug shows the traceback"),
        (EOFError("short"), 1, "unexpected", "EOFError: short; --debug shows the traceback"),
    ],
)
def test_every_error_is_one_line(
    kimik3: Call, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, kind: str, message: str
) -> None:
    def fail(request: object, update: object) -> None:
        raise error

    monkeypatch.setattr(service, "run_generate", fail)
    assert refused(kimik3(*IDS), code) == message
    as_json = kimik3(*IDS, "--json")
    assert as_json.out == ""
    assert json.loads(as_json.err) == {"error": {"kind": kind, "message": message}}
    with_debug = kimik3(*IDS, "--debug")
    assert with_debug.code == code
    assert with_debug.err.startswith("Traceback (most recent call last):\n")
    assert with_debug.err.splitlines()[-1] == f"kimik3: error: {message}"


def test_an_interrupt_is_quiet(kimik3: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(request: object, update: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(service, "run_generate", interrupt)
    assert kimik3(*IDS, "--json") == Ran(130, "", "")


def test_what_libraries_print_goes_to_stderr(kimik3: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    import warnings

    def chatter(request: object, update: object) -> None:
        print("loading shards")
        warnings.warn("old\nthing", DeprecationWarning, stacklevel=1)
        raise CheckpointError("enough")

    monkeypatch.setattr(service, "run_generate", chatter)
    monkeypatch.setattr(warnings, "filters", [("always", None, Warning, None, 0)])
    ran = kimik3(*IDS)
    assert ran.out == ""
    assert ran.err == "loading shards\nkimik3: warning: old thing\nkimik3: error: enough\n"
    assert "warning" not in kimik3(*IDS, "--quiet").err


def test_quiet_silences_log_messages_and_leaves_logging_as_it_was(
    kimik3: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    import logging

    def chatter(request: object, update: object) -> None:
        logging.getLogger("some.library").warning("loud")
        raise CheckpointError("enough")

    monkeypatch.setattr(service, "run_generate", chatter)
    assert kimik3(*IDS, "--quiet").err == "kimik3: error: enough\n"
    assert logging.root.manager.disable == 0
