"""The Typer app, and main: the only place that catches errors and turns them into exit codes."""

import sys
import traceback
from collections.abc import Sequence
from inspect import Parameter
from typing import Annotated, Any

import typer

from kimik3_cli import __version__
from kimik3_cli.cli import commands
from kimik3_cli.cli.options import (
    BENCH,
    CONVERT,
    GENERATE,
    INSPECT,
    LOGITS,
    MODEL,
    PROMPT,
    SAMPLING,
    SCHEMA,
    Action,
    show_help,
    take_switches,
    with_options,
)
from kimik3_cli.errors import Kimik3Error
from kimik3_cli.render.output import Output, abandon_stdout, is_plain, library_noise, write_stdout

UNEXPECTED, INTERRUPTED, STDOUT_CLOSED = 1, 130, 141

app = typer.Typer(
    name="kimik3",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kimik3 {__version__}")
        raise typer.Exit


def _root_switch(name: str, text: str, callback: Any) -> Any:
    return typer.Option(name, metavar=" ", help=text, is_eager=True, callback=callback)


@app.callback(invoke_without_command=True, add_help_option=False)
def _root(
    context: typer.Context,
    version: Annotated[bool, _root_switch("--version", "Show the version.", _show_version)] = False,
    wants_help: Annotated[bool, _root_switch("--help", "Show this page.", show_help)] = False,
) -> None:
    """Run Kimi-K3-architecture checkpoints."""
    if context.invoked_subcommand is None:
        show_help(context, True)


def _add(name: str, run: Any, options: Sequence[Parameter], *examples: str) -> None:
    epilog = "\n".join(["[bold]Examples[/]", *(f"kimik3 {name} {example}" for example in examples)])
    app.command(name, epilog=epilog, add_help_option=False)(with_options(run, options))


_add(
    "generate",
    commands.generate,
    (*MODEL, *PROMPT, *SAMPLING, *GENERATE),
    "--prompt 'To be, or not to be'",
    "--token-ids 7,13,29 --mode sample --seed 7 --stream",
)
_add(
    "logits",
    commands.logits,
    (*MODEL, *PROMPT, *LOGITS),
    "--prompt 'To be, or not to' --top 5",
    "--token-ids 7,13,29 --output logits.npy",
)
_add("inspect-checkpoint", commands.inspect_checkpoint, INSPECT, "model.pt", "model.pt --deep --tensors --json")
_add("bench", commands.bench, BENCH, "--prompt-tokens 128,512", "--random m-k3 --threads 2 --json")
_add("convert", commands.convert, CONVERT, "model.pt model-hf --dtype bf16", "model-hf model.pt --overwrite")
_add("schema", commands.schema, SCHEMA, "generate", "inspect > inspect.json")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; never raises, never exits."""
    switches, words = take_switches(sys.argv[1:] if argv is None else argv)
    output = Output(as_json=switches.json, quiet=switches.quiet)
    try:
        with library_noise(output):
            return _run(words, output)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (BrokenPipeError, SystemExit):  # Rich turns a closed pipe into SystemExit
        abandon_stdout()
        return STDOUT_CLOSED
    except Exception as error:
        kind, message, code = _described(error)
        output.error(kind, message, traceback.format_exc() if switches.debug else "")
        return code


def _run(words: list[str], output: Output) -> int:
    if not words or "--help" in words:
        _colour_help()
    action: Action | int | None = app(words, prog_name="kimik3", standalone_mode=False)
    if callable(action):
        return action(output)
    write_stdout(b"")  # Typer has answered by itself, and what it printed must arrive
    return action or 0


def _described(error: Exception) -> tuple[str, str, int]:
    """Return kind, message and exit code of an error."""
    if isinstance(error, Kimik3Error):
        return error.kind, str(error), error.exit_code
    if isinstance(error, typer.TyperException):
        command = getattr(getattr(error, "ctx", None), "command_path", "kimik3")
        return "usage", f"{error.format_message().rstrip('.')}; see {command} --help", error.exit_code
    if isinstance(error, MemoryError):
        detail = f" ({error})" if str(error) else ""
        return "memory", f"out of memory{detail}; take a smaller model or a machine with more", UNEXPECTED
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename else ""
        return "os", f"{error.strerror or error}{where}", UNEXPECTED
    return "unexpected", f"{type(error).__name__}: {error}; --debug shows the traceback", UNEXPECTED


def _colour_help() -> None:
    """Typer's help pages know NO_COLOR only by half: Rich would still write bold and dim."""
    from typer import rich_utils

    rich_utils.COLOR_SYSTEM = None if is_plain() else "auto"
