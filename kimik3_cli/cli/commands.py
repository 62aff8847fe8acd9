"""The commands: values of options -> request -> engine -> sink. Imports that cost time stay inside."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kimik3_cli
from kimik3_cli.cli.options import Values
from kimik3_cli.errors import RequestError
from kimik3_cli.render.output import Output

if TYPE_CHECKING:
    from kimik3_cli.requests import GenerateRequest
    from kimik3_cli.results import GenerateResult, StreamPiece

BUNDLED_CHECKPOINT = Path(kimik3_cli.__file__).parent / "assets" / "demo.pt"
STDIN_PROMPT = "-"
CHECKPOINT_HAS_PROBLEMS = 3


def generate(output: Output, values: Values) -> int:
    """Continue a prompt, greedily or by sampling."""
    from kimik3_cli.engine.service import run_generate, stream_generate
    from kimik3_cli.requests import GenerateRequest

    request = _with_stdin(GenerateRequest, {name: value for name, value in values.items() if name != "stream"})
    if output.human or values["stream"]:
        items = output.as_they_come("loading the model", lambda update: stream_generate(request, update))
        _show_as_they_come(output, request, items) if output.human else _print_as_they_come(output, items)
        return 0
    with output.working("loading the model") as update:
        result = run_generate(request, update)
    output.emit_json(result.to_json())
    return 0


def _print_as_they_come(output: Output, items: "Iterator[StreamPiece | GenerateResult]") -> None:
    """Write one line of JSON for each piece, and the result as the last line."""
    for item in items:
        output.emit_json(item.to_json_line())


def _show_as_they_come(
    output: Output, request: "GenerateRequest", items: "Iterator[StreamPiece | GenerateResult]"
) -> None:
    """Write to the terminal the prompt, the text as it comes, and a line of facts."""
    from kimik3_cli.render.human import generate_facts, piece_text, prompt_view
    from kimik3_cli.results import StreamPiece

    first = next(items)  # nothing is written before all that can be refused has been
    with output.open_line():
        output.show(prompt_view(request.prompt or " ".join(map(str, request.token_ids or ()))))
        for item in chain([first], items):
            if isinstance(item, StreamPiece):
                output.write(piece_text(item))
            else:
                output.show(generate_facts(item))


def logits(output: Output, values: Values) -> int:
    """Show the distribution of the next token after a prompt."""
    from kimik3_cli.engine.service import run_logits
    from kimik3_cli.requests import LogitsRequest

    request = _with_stdin(LogitsRequest, values)
    with output.working("loading the model") as update:
        result = run_logits(request, update)

    def view() -> Any:
        from kimik3_cli.render.human import logits_view

        return logits_view(result)

    output.emit(result, view)
    return 0


def inspect_checkpoint(output: Output, values: Values) -> int:
    """Report what a checkpoint holds and what is wrong."""
    from kimik3_cli.engine.checkpoint import inspection
    from kimik3_cli.requests import InspectRequest

    request = InspectRequest.build(**values)
    with output.working("reading the checkpoint"):
        result = inspection.inspect_checkpoint(request.path, tensors=request.tensors, deep=request.deep)

    def view() -> Any:
        from kimik3_cli.render.human import inspect_view

        return inspect_view(result)

    output.emit(result, view)
    return CHECKPOINT_HAS_PROBLEMS if result.problems else 0


def bench(output: Output, values: Values) -> int:
    """Measure load, prefill and decoding speed of a model here."""
    from kimik3_cli.engine.benchmark.service import run_bench
    from kimik3_cli.requests import BenchRequest

    request = BenchRequest.build(**{"checkpoint": str(BUNDLED_CHECKPOINT), **values})
    with output.working("measuring the machine") as update:
        result = run_bench(request, update)

    def view() -> Any:
        from kimik3_cli.render.bench import bench_view

        return bench_view(result)

    output.emit(result, view)
    return 0


def convert(output: Output, values: Values) -> int:
    """Turn a checkpoint into a Hugging Face directory, or back."""
    from kimik3_cli.requests import ConvertRequest

    request = ConvertRequest.build(**values)
    from kimik3_cli.engine.convert.service import run_convert  # a wrong request does not wait for torch

    with _ended_like_interrupted(), output.working("reading the checkpoint") as update:
        result = run_convert(request, update)

    def view() -> Any:
        from kimik3_cli.render.convert import convert_view

        return convert_view(result)

    output.emit(result, view)
    return 0


@contextmanager
def _ended_like_interrupted() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does, so that half-written files are removed."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def schema(output: Output, values: Values) -> int:
    """Print the JSON schema of a command's result."""
    import json

    from kimik3_cli import results

    models: dict[str, type[results.Result]] = {
        "generate": results.GenerateResult,
        "stream": results.StreamPiece,
        "logits": results.LogitsResult,
        "inspect": results.InspectResult,
        "bench": results.BenchResult,
        "convert": results.ConvertResult,
    }
    name = values["name"]
    if name not in models:
        raise RequestError(f"NAME is {name!r}; give {', '.join(models)}")
    output.emit_json(json.dumps(models[name].model_json_schema(mode="serialization"), indent=2, ensure_ascii=False))
    return 0


def _with_stdin(kind: Any, values: Values) -> Any:
    """Build the request; `--prompt -` becomes the text of standard input once all else is known to be right."""
    given = {"checkpoint": str(BUNDLED_CHECKPOINT), **values}
    if "prompt" in given:
        given["prompt"] = _as_utf8(given["prompt"])
    request = kind.build(**given)
    if request.prompt != STDIN_PROMPT:
        return request
    return kind.build(**{**given, "prompt": _read_stdin()})


def _as_utf8(word: str) -> str:
    """Return a word of the command line read as UTF-8, in whatever encoding the locale has read it."""
    try:
        return os.fsencode(word).decode()
    except UnicodeError:
        return word


def _read_stdin() -> str:
    """Read a prompt: UTF-8, less one final newline (LF or CRLF).

    Raises:
        RequestError: standard input is closed, empty or not UTF-8.
    """
    if sys.stdin is None:
        raise RequestError("--prompt is '-', but standard input is closed; give the text itself or pipe it in")
    data = sys.stdin.buffer.read()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"--prompt is '-', but byte {error.start} of standard input is 0x{data[error.start]:02x}, "
            "which is not valid UTF-8; give UTF-8 text"
        ) from None
    text = text.removesuffix("\n").removesuffix("\r") if text.endswith("\r\n") else text.removesuffix("\n")
    if not text:
        raise RequestError("--prompt is '-', but standard input is empty; give at least one character")
    return text
