"""A benchmark as a table for a terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kimik3_cli.render.output import printable
from kimik3_cli.results import BenchResult, Spread


def bench_view(result: BenchResult) -> RenderableType:
    """What ran, what the machine can do, loading, and a row for each prompt length."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("prompt", "prefill tokens/s", "of the floor", "decode ms/token", "of the floor", "peak memory"):
        table.add_column(name, justify="right")
    for run in result.runs:
        table.add_row(
            str(run.prompt_tokens),
            _spread(run.prefill_tokens_per_second, 0),
            f"{run.prefill_fraction_of_floor:.2f}",
            _spread(run.decode_ms_per_token, 2),
            f"{run.decode_fraction_of_floor:.2f}",
            f"{run.peak_memory_bytes / 1e6:,.0f} MB",
        )
    return Group(*(Text(line) for line in _facts(result)), "", table, "", Text(_explanation(result), "dim"))


def _facts(result: BenchResult) -> list[str]:
    model = printable(result.random or result.checkpoint or "")
    counts, machine = result.parameters, result.machine
    cache = "cached" if result.cache else "no cache: every token recomputes its prefix"
    facts = [
        model,
        f"{counts.total:,} parameters, {counts.active:,} active per token",
        f"{result.device}, {result.threads} threads, {result.precision}, {result.backend}, {cache}",
        f"machine: reads {machine.read_bytes_per_second / 1e9:.1f} GB/s, "
        f"multiplies matrices at {machine.matrix_flops_per_second / 1e9:.0f} GFLOP/s",
    ]
    if result.load:
        growth, weights = result.load.peak_memory_growth_bytes / 1e6, result.load.weights_bytes / 1e6
        memory = f"peak memory +{growth:,.0f} MB for {weights:,.0f} MB of weights"
        facts.append(f"load: {result.load.seconds:.2f} s, {memory}")
    return facts


def _explanation(result: BenchResult) -> str:
    return (
        f"Medians of {result.repeats} rounds of {result.runs[0].new_tokens} new tokens, ± half of the spread. The "
        "floor is what the machine's matrix rate allows in prefill, and what reading active weights and cache once a "
        "token allows in decode: 1.00 is best."
    )


def _spread(spread: Spread, digits: int) -> str:
    half = (spread.high - spread.low) / 2 / spread.median
    return f"{spread.median:,.{digits}f} ±{half:.0%}"
