"""Results as pictures for a terminal. Nothing is printed here; all text of models and files is shown escaped."""

import math
from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from kimik3_cli.render.output import printable
from kimik3_cli.results import (
    CheckpointInfo,
    GenerateResult,
    InspectResult,
    LogitsResult,
    StreamPiece,
    TensorInfo,
    TopToken,
    sized,
)

BAR_WIDTH = 40
LISTED_ENTRIES = 20
SEPARATOR = "  |  "
FAMILIES = {
    "kda": "KDA",
    "mla": "MLA",
    "dense_ffn": "dense FFN",
    "routed_experts": "routed experts",
    "shared_experts": "shared experts",
}


def prompt_view(prompt: str) -> RenderableType:
    """The prompt dimmed, exactly as it is and without a newline: its continuation follows."""
    return Segments([Segment(printable(prompt), Style(dim=True))])


def piece_text(piece: StreamPiece) -> str:
    """What one new token adds on the terminal: its text, or its id when there is no text."""
    return printable(piece.text) if "text" in piece.model_fields_set else f" {piece.token_id}"


def generate_facts(result: GenerateResult) -> RenderableType:
    """Ends the line of the continuation and adds one line of facts."""
    end = "end of text" if result.finish_reason == "eos" else "length reached"
    count = _count(len(result.generated_token_ids), "new token")
    facts = f"{count}, {end}{SEPARATOR}{_where(result.checkpoint, result.device, result.precision)}"
    return Group("", "", Text(facts, "dim"))


def logits_view(result: LogitsResult) -> RenderableType:
    """The best next tokens with their probabilities as bars."""
    with_text = any("text" in token.model_fields_set for token in result.top)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("id", justify="right")
    if with_text:
        table.add_column("token", overflow="ellipsis", no_wrap=True)
    table.add_column("logit", justify="right")
    table.add_column("probability", justify="right")
    table.add_column("")
    highest = max(_probability(token) for token in result.top)
    for token in result.top:
        probability = _probability(token)
        text = [Text(_quoted(token.text))] if with_text else []
        share = probability / highest if highest else 0.0
        table.add_row(str(token.token_id), *text, f"{token.logit:.3f}", _percent(probability), Bar(share, "cyan"))
    prompt = _count(len(result.prompt_token_ids), "prompt token")
    facts = f"after {prompt}{SEPARATOR}{_where(result.checkpoint, result.device, result.precision)}"
    return Group(table, "", *_rest(result), Text(facts, "dim"))


def inspect_view(result: InspectResult) -> RenderableType:
    """The model as a tree of parts with parameter counts, then storage, trainer state, memory and problems."""
    kind = "Hugging Face directory" if result.format_version is None else f"format {result.format_version}"
    title = Text.assemble((_safe(result.path), "bold"), f"  {sized(result.file_size)}, {kind}")
    tree = Tree(title, guide_style="dim")
    tree.add(_parameters(result))
    for name, facts in _sections(result):
        branch = tree.add(Text(name, "bold"))
        for fact in facts:
            branch.add(Text(fact))
    tree.add(_problems(result))
    return Group(tree, "", _tensor_table(result.tensors)) if result.tensors else tree


def _rest(result: LogitsResult) -> Iterable[Text]:
    """Where the logits are that the table does not show."""
    if result.output:
        yield Text(f"all logits written to {_safe(result.output)}", "dim")
    if result.logits:
        yield Text("--json prints all logits, --output writes them to a file", "dim")


class Bar:
    """A horizontal bar that takes `share` (0 to 1) of the width it is given."""

    def __init__(self, share: float, style: str) -> None:
        """Remember what to draw."""
        self.share = share
        self.style = style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw whole character cells, at least one for anything above 0."""
        cells = round(self.share * options.max_width) or int(self.share > 0)
        yield Text(("#" if options.ascii_only else "█") * cells, self.style)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Take what is left of the line, up to the widest bar."""
        return Measurement(1, min(BAR_WIDTH, options.max_width))


def _where(checkpoint: CheckpointInfo, device: str, precision: str) -> str:
    step = "" if checkpoint.step is None else f", step {checkpoint.step:,}"
    size = _short(checkpoint.parameters)
    return f"{_safe(checkpoint.path)}, {size} parameters{step}{SEPARATOR}{device}, {precision}"


def _parameters(result: InspectResult) -> RenderableType:
    counts = result.parameters
    total = max(counts.total, 1)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column()
    for name, count in counts.parts:
        label = FAMILIES.get(name, name)
        if name == "head" and result.tied_embeddings:
            label = "head (tied to the embedding)"
        style = "" if count else "dim"
        share = count / total
        table.add_row(Text(label, style), Text(f"{count:,}", style), Text(_percent(share), style), Bar(share, "cyan"))
    title = Text.assemble(("model", "bold"), f"  {counts.total:,} parameters, {counts.active:,} active per token")
    branch = Tree(title, guide_style="dim")
    branch.add(table)
    return branch


def _sections(result: InspectResult) -> Iterable[tuple[str, Sequence[str]]]:
    memory = result.memory
    yield "architecture", _architecture(result)
    yield (
        "storage",
        [
            f"{use.dtype}: {_count(use.tensors, 'tensor')}, {use.parameters:,} parameters, {sized(use.bytes)}"
            for use in result.dtypes
        ],
    )
    yield (
        "memory for inference",
        [
            *([_safe(memory.advice)] if memory.advice else []),
            f"weights {sized(memory.weights_bytes)}",
            f"cache {sized(memory.cache_bytes_fixed)} fixed + {sized(memory.cache_bytes_per_token)} a token",
        ],
    )
    if result.tokenizer:
        revision = f", revision {_safe(result.tokenizer.revision)}" if result.tokenizer.revision else ""
        yield "tokenizer", [_safe(result.tokenizer.name_or_path) + revision]
    if result.format_version is None:
        yield "files", _files(result)
    else:
        yield "trainer", _trainer(result)
    if result.stripped_prefix:
        whose = "most names" if result.format_version is None else "every tensor"
        yield "names", [f"prefix {_safe(result.stripped_prefix)} stripped from {whose}"]
    if "records_verified" in result.model_fields_set:
        checked = f"{_count(result.records_verified, 'record')} read and checked"
        yield "file", ["values read; safetensors has no checksums" if result.format_version is None else checked]


def _architecture(result: InspectResult) -> list[str]:
    config = result.config
    linear = config.get("linear_attn_config") or {}
    kda, full = linear.get("kda_layers") or [], linear.get("full_attn_layers") or []
    lines = [
        f"{config.get('num_hidden_layers')} layers: {len(kda)} KDA, {len(full)} full attention",
        f"hidden size {config.get('hidden_size')}, vocabulary {config.get('vocab_size')}, "
        f"context {config.get('max_seq_len')}",
    ]
    if config.get("num_experts"):
        lines.append(
            f"{config['num_experts']} experts, {config.get('num_experts_per_token')} a token, "
            f"{config.get('num_shared_experts')} shared"
        )
    return [_safe(line) for line in lines]


def _files(result: InspectResult) -> list[str]:
    tensors = sum(shard.tensors for shard in result.shards)
    lines = [f"{_count(len(result.shards), 'safetensors file')} with {_count(tensors, 'tensor')}"]
    if result.skipped.tensors:
        lines.append(f"{_count(result.skipped.tensors, 'vision tensor')} skipped, {sized(result.skipped.bytes)}")
    return lines


def _trainer(result: InspectResult) -> list[str]:
    step = "step not recorded" if result.step is None else f"step {result.step:,}"
    lines = [f"{step}, KDA backend {result.training_kda_backend}"]
    for entry in result.trainer_state[:LISTED_ENTRIES]:
        size = f"  {sized(entry.bytes)}" if entry.bytes else ""
        value = f" = {entry.value}" if "value" in entry.model_fields_set else f"  {entry.kind}"
        lines.append(_safe(f"{entry.name}{value}{size}"))
    rest = len(result.trainer_state) - LISTED_ENTRIES
    return [*lines, f"and {rest:,} more, which --json lists"] if rest > 0 else lines


def _problems(result: InspectResult) -> RenderableType:
    if not result.problems:
        is_deep = "records_verified" in result.model_fields_set
        return Text("no problems" if is_deep else "no problems in the structure; --deep also reads the data", "green")
    branch = Tree(Text(_count(len(result.problems), "problem"), "bold red"), guide_style="red")
    for problem in result.problems:
        branch.add(Text(_safe(problem.message), "red"))
    return branch


def _tensor_table(tensors: Sequence[TensorInfo]) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("tensor", overflow="fold")
    table.add_column("shape")
    table.add_column("dtype")
    table.add_column("bytes", justify="right")
    for tensor in tensors:
        shape = " x ".join(map(str, tensor.shape)) or "scalar"
        table.add_row(Text(_safe(tensor.name)), shape, Text(_safe(tensor.dtype)), f"{tensor.bytes:,}")
    return table


def _probability(token: TopToken) -> float:
    return math.exp(token.logprob)


def _safe(text: str) -> str:
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def _quoted(text: str) -> str:
    return f'"{_safe(text)}"'


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _short(number: float) -> str:
    for unit in ("", "K", "M", "B"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:,.0f}T"
