"""Every option of every command: name, panel, default and one line of help.

Typer reads them as a function's signature. All values stay text until requests.py validates them, so that each refusal
is worded in one place and pydantic is not imported for a help page.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import Parameter, Signature
from itertools import islice
from typing import Annotated, Any, NamedTuple

import typer

from kimik3_cli.render.output import Output

Values = Mapping[str, Any]
Action = Callable[[Output], int]
SWITCHES = ("--json", "--debug", "--quiet")
CHECKPOINT_VARIABLE = "KIMIK3_CHECKPOINT"


class Switches(NamedTuple):
    """What the switches of every command say about its output."""

    json: bool = False
    debug: bool = False
    quiet: bool = False


def _option(panel: str, name: str, metavar: str, text: str, default: str | None = None, **more: Any) -> Parameter:
    flag = "--" + name.replace("_", "-")
    info = typer.Option(flag, metavar=metavar, help=text, rich_help_panel=panel, **more)
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=Annotated[str | None, info], default=default)


def _switch(panel: str, name: str, text: str, **more: Any) -> Parameter:
    flag = "--" + name.replace("_", "-")
    info = typer.Option(flag, metavar=" ", help=text, rich_help_panel=panel, **more)
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=Annotated[bool, info], default=False)


def _argument(name: str, text: str) -> Parameter:
    info = typer.Argument(metavar=name.upper(), help=text, show_default=False)
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=Annotated[str, info])


def show_help(context: typer.Context, wanted: bool) -> None:
    """Print the page of a command and stop."""
    if wanted:
        typer.echo(context.get_help(), nl=False)
        raise typer.Exit


_CHECKPOINT_HELP = f"Else ${CHECKPOINT_VARIABLE}, else the bundled model."
_LENGTH = _option("Model", "max_seq_len", "N", "Shorten the context to N tokens.")
MODEL = (
    _option("Model", "checkpoint", "PATH", _CHECKPOINT_HELP, envvar=CHECKPOINT_VARIABLE, show_envvar=False),
    _option("Model", "device", "NAME", "auto, cpu, cuda or cuda:N.", "auto"),
    _option("Model", "backend", "NAME", "chunkwise or fused; else fused where it can run."),
    _option("Model", "precision", "NAME", "fp32, or bf16 on CUDA.", "fp32"),
    _option("Model", "pad_id", "ID", "Padding token; else the checkpoint's."),
    _LENGTH,
)
PROMPT = (
    _option("Prompt", "prompt", "TEXT", "Text; - reads standard input."),
    _option("Prompt", "token_ids", "IDS", "Instead of text: ids such as 7,13,29."),
    _option("Prompt", "tokenizer", "NAME", "Name or folder; else the checkpoint's."),
    _option("Prompt", "tokenizer_revision", "REV", "Its revision on the hub; else main."),
    _switch("Prompt", "local_files_only", "Never ask the hub."),
    _switch("Prompt", "trust_remote_code", "Run code that comes with the tokenizer."),
    _switch("Prompt", "allow_vocab_padding", "The tokenizer may lack ids."),
)
SAMPLING = (
    _option("Sampling", "max_new_tokens", "N", "Tokens to add at most.", "32"),
    _option("Sampling", "mode", "NAME", "greedy or sample.", "greedy"),
    _option("Sampling", "temperature", "X", "Divide the logits by X.", "1.0"),
    _option("Sampling", "top_k", "N", "Draw from the N likeliest.", "50"),
    _option("Sampling", "top_p", "X", "Draw from those that reach X.", "1.0"),
    _option("Sampling", "seed", "N", "Seed of the draws.", "0"),
    _option("Sampling", "eos_id", "ID", "Token that ends text; else the tokenizer's."),
)
GENERATE = (
    _switch("Model", "no_cache", "Recompute the prefix for every token."),
    _switch("Output", "stream", "One line of JSON a token, as they come."),
)
LOGITS = (
    _option("Output", "top", "N", "List the N best tokens.", "10"),
    _switch("Output", "full", "Add the logits of all tokens."),
    _option("Output", "output", "FILE", "Write them to a .npy, .safetensors or .pt file."),
)
INSPECT = (
    _argument("path", "The checkpoint to look at."),
    _switch("Output", "tensors", "List every tensor."),
    _switch("Output", "deep", "Read all data: checksums, non-finite values."),
)
BENCH = (
    _option("Model", "checkpoint", "PATH", _CHECKPOINT_HELP, envvar=CHECKPOINT_VARIABLE, show_envvar=False),
    _option("Model", "random", "SIZE", "Instead: random s-, m- or l-k3, or -klin."),
    _option("Model", "device", "NAME", "auto, cpu, cuda or cuda:N.", "auto"),
    _option("Model", "backend", "NAME", "chunkwise or fused; else fused where it can run."),
    _option("Model", "precision", "NAME", "fp32, or bf16 on CUDA.", "fp32"),
    _LENGTH,
    _option("Measurement", "prompt_tokens", "LENGTHS", "Such as 128,512; else what fits."),
    _option("Measurement", "new_tokens", "N", "Tokens to decode after each.", "64"),
    _option("Measurement", "repeats", "N", "Rounds after one warm-up.", "5"),
    _option("Measurement", "threads", "N", "CPU threads; else torch's choice."),
    _switch("Measurement", "no_cache", "Recompute the prefix for every token."),
)
CONVERT = (
    _argument("src", "A file of format 7, or a directory."),
    _argument("dst", "The directory or file to write."),
    _option("Output", "dtype", "NAME", "fp32, bf16 or fp16; else as stored."),
    _switch("Output", "overwrite", "Replace DST if it exists."),
)
SCHEMA = (_argument("name", "Such as generate, stream or inspect."),)
COMMON = (
    _switch("Output", "json", "JSON on a terminal too."),
    _switch("Output", "debug", "Show the traceback of an error."),
    _switch("Output", "quiet", "No progress, no warnings."),
    _switch("Output", "help", "Show this page.", is_eager=True, callback=show_help),
)


def with_options(run: Callable[[Output, Values], int], options: Sequence[Parameter]) -> Callable[..., Action]:
    """Return a function that Typer sees with these options.

    It does nothing but return what is to be done with the values that were given, so that the work runs outside Typer,
    which has its own ideas of what an interrupt or the end of a file means.
    """

    def command(**values: Any) -> Action:
        given = {name: value for name, value in values.items() if _is_given(name, value)}
        return lambda output: run(output, given)

    command.__signature__ = Signature([*options, *COMMON])  # type: ignore[attr-defined]
    command.__doc__ = run.__doc__
    return command


def _is_given(name: str, value: object) -> bool:
    return value is not None and name not in {parameter.name for parameter in COMMON}


def take_switches(words: Sequence[str]) -> tuple[Switches, list[str]]:
    """Take --json, --debug and --quiet out of a command line, wherever they stand.

    They decide how a usage error looks, so they are read before Typer parses anything. The value of an option stays:
    in `--prompt --json` the second word is a prompt.
    """
    rest: list[str] = []
    taken = set()
    remaining: Iterator[str] = iter(words)
    for word in remaining:
        if word in SWITCHES:
            taken.add(word)
            continue
        rest.append(word)
        if word == "--":
            rest.extend(remaining)
        elif word in _TAKES_VALUE:
            rest.extend(islice(remaining, 1))
    return Switches(*(switch in taken for switch in SWITCHES)), rest


def _flags_with_values() -> frozenset[str]:
    options = (*MODEL, *PROMPT, *SAMPLING, *LOGITS, *BENCH, *CONVERT)
    return frozenset("--" + option.name.replace("_", "-") for option in options if option.default is not False)


_TAKES_VALUE = _flags_with_values()
