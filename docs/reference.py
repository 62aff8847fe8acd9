"""Writes what docs/ copies from the program: the help pages in cli.md, and schema/. Run it when either has changed."""

import io
import os
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

from kimik3_cli.cli.app import main

DOCS = Path(__file__).parent
SCHEMAS = ("generate", "stream", "logits", "inspect", "bench", "convert")
COLUMNS = "80"
# A block of cli.md between ```text and ``` that begins with a command is the output of that command.
BLOCK = re.compile(r"^```text\n\$ kimik3 ([^\n]+)\n.*?^```$", re.MULTILINE | re.DOTALL)


def output_of(*words: str) -> str:
    """What a command prints to a pipe."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with redirect_stdout(stream):
        code = main(words)
    assert code == 0, words
    return stream.buffer.getvalue().decode()


def help_page(command: str) -> str:
    """The block of one command, without the spaces that Rich puts at the ends of lines."""
    before = {name: os.environ.pop(name, None) for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR", "TERM")}
    os.environ["COLUMNS"] = COLUMNS
    try:
        lines = [line.rstrip() for line in output_of(*command.split()).strip("\n").splitlines()]
    finally:
        del os.environ["COLUMNS"]
        os.environ.update({name: value for name, value in before.items() if value is not None})
    return "\n".join([f"```text\n$ kimik3 {command}", *lines, "```"])


def generated() -> dict[Path, str]:
    """Every file that is copied from the program, with its text as it should be."""
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    files = {DOCS / "cli.md": BLOCK.sub(lambda match: help_page(match[1]), page)}
    return files | {DOCS / "schema" / f"{name}.json": output_of("schema", name) for name in SCHEMAS}


if __name__ == "__main__":
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")
        print(path, file=sys.stderr)
