"""A conversion as a page for a terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kimik3_cli.render.output import printable
from kimik3_cli.results import ConvertResult

LAYOUTS = {"format_7": "format 7", "kimi_linear": "Kimi Linear directory", "kimi_k3": "K3 directory"}


def convert_view(result: ConvertResult) -> RenderableType:
    """What was written, what was left behind, and a row for each file."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("file", overflow="fold")
    table.add_column("bytes", justify="right")
    table.add_column("sha256", overflow="fold")
    for file in result.files:
        table.add_row(Text(printable(file.name)), f"{file.bytes:,}", file.sha256)
    return Group(*(Text(line) for line in _facts(result)), "", table)


def _facts(result: ConvertResult) -> list[str]:
    dtypes = ", ".join(f"{use.parameters:,} in {use.dtype}" for use in result.dtypes)
    facts = [
        f"{printable(result.destination)}: {LAYOUTS[result.layout]}",
        f"{result.tensors:,} tensors, {result.parameters:,} parameters ({dtypes})",
    ]
    if result.dropped:
        facts.append("not carried over: " + ", ".join(printable(name) for name in result.dropped))
    return facts
