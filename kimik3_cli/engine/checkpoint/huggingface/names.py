"""Names in the files of a Hugging Face directory -> names of the model, and fused tensors -> views of their parts.

The spellings are those of the released K3, of the released Kimi Linear, and of transformers 5, which saves its own or
a form close to the released one. Nothing is copied: a part of a fused tensor is a view of the same bytes. Letters:
E experts, I their width, L their latent, H heads, K head size, c convolution taps.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kimik3_cli.engine.checkpoint.stored import (
    CODES_PER_BYTE,
    CODES_PER_SCALE,
    LostTensor,
    PackedRef,
    TensorRef,
    kind_of,
    printable,
)
from kimik3_cli.engine.config import KimiK3Config
from kimik3_cli.results import Problem

# First components of the names of what a text model skips.
VISION = frozenset({"vision_tower", "vision_model", "mm_projector", "multi_modal_projector"})
DENSE, SPARSE, EXPERTS, SHARED = "mlp", "block_sparse_moe", ".experts.", ".shared_experts."
STACKS, CONVOLUTIONS = ("gate_up_proj", "down_proj"), ".conv1d.weight"
CODES, SCALES = "_packed", "_scale"
CODE_DTYPES, SCALE_DTYPES = ("uint8",), ("uint8", "float8_e8m0fnu")

Entry = TensorRef | LostTensor
Named = Entry | PackedRef


class TextTensors(NamedTuple):
    """The tensors of the text model by its own names, what it skips by the files' names, and what does not add up."""

    tensors: dict[str, Named]
    skipped: dict[str, Entry]
    prefix: str
    problems: list[Problem]


def text_tensors(config: KimiK3Config, entries: Mapping[str, Entry]) -> TextTensors:
    """Sort the tensors of a directory by the names of the model."""
    tensors: dict[str, Named] = {}
    skipped: dict[str, Entry] = {}
    problems: list[Problem] = []
    sources: dict[str, str] = {}  # name in the model -> name in the files
    modules: dict[str, str] = {}  # what a name has before its experts -> the same in the model; few for many experts
    for stored_name, entry in entries.items():
        stored_module, dot, rest = stored_name.partition(EXPERTS)
        if stored_module not in modules:
            modules[stored_module] = _model_name(config, stored_module)
        name = modules[stored_module] + dot + rest
        if name.partition(".")[0] in VISION:
            skipped[stored_name] = entry
            continue
        if SHARED in name and not config.num_shared_experts and isinstance(entry, TensorRef) and not entry.numel:
            continue  # transformers has these matrices, of width 0, even without shared experts
        is_fused = (rest in STACKS or name.endswith(CONVOLUTIONS)) and _comes_apart(rest, entry)
        for part_name, part in _parts(name, entry, config.num_experts or 0) if is_fused else [(name, entry)]:
            if part_name in tensors:
                problems.append(_double(stored_name, part_name, sources[part_name]))
            tensors[part_name], sources[part_name] = part, stored_name
    problems += _pack(tensors)
    return TextTensors(tensors, skipped, _usual_prefix(modules), problems)


def _model_name(config: KimiK3Config, stored_name: str) -> str:
    """Return a name without its prefix, and without what transformers changes: the forget gate's module, and the
    feed-forward, which it calls `mlp` everywhere or nowhere.
    """
    name = _without_prefix(stored_name)
    first, number, part, *rest = [*name.split(".", 3), "", ""]
    if first == "layers" and part in (DENSE, SPARSE) and number.isdecimal():
        part = SPARSE if config.is_moe(int(number)) else DENSE
        return ".".join([first, number, part, *rest]).rstrip(".")
    return name.replace(".self_attn.forget_gate.", ".self_attn.")


def _usual_prefix(modules: Mapping[str, str]) -> str:
    """Return the prefix that most names carried: `language_model.model.`, `model.` or none."""
    prefixes = Counter(name[: len(name) - len(_without_prefix(name))] for name in modules)
    return max(prefixes, key=prefixes.__getitem__, default="")


def _without_prefix(name: str) -> str:
    return name.removeprefix("language_model.").removeprefix("model.")


def _parts(name: str, entry: Entry, experts: int) -> Iterator[tuple[str, Named]]:
    """Yield the tensors of the model that a fused tensor of a file holds."""
    prefix, _, last = name.rpartition(EXPERTS)
    if last == STACKS[0]:  # [E,2I,L]
        for e, expert in enumerate(_along(entry, experts)):
            for w, half in zip(("w1", "w3"), _split(expert, 2), strict=True):
                yield f"{prefix}{EXPERTS}{e}.{w}.weight", half
    elif last == STACKS[1]:  # [E,L,I]
        for e, expert in enumerate(_along(entry, experts)):
            yield f"{prefix}{EXPERTS}{e}.w2.weight", expert
    else:  # [3HK,1,c]
        module = name.removesuffix(CONVOLUTIONS)
        for letter, part in zip("qkv", _split(entry, 3), strict=True):
            yield f"{module}.{letter}_conv1d.weight", part


def _comes_apart(stack: str, entry: Entry) -> bool:
    """Say whether a fused tensor has the axes that its parts lie along; else it stays whole, and so is unexpected."""
    if isinstance(entry, LostTensor):
        return True
    if len(entry.shape) != 3:
        return False
    return entry.shape[1] % 2 == 0 if stack == STACKS[0] else stack == STACKS[1] or entry.shape[0] % 3 == 0


def _along(entry: Entry, count: int) -> Iterator[Entry]:
    """Yield the matrices of a stack [E,rows,columns]."""
    if isinstance(entry, LostTensor):
        yield from [entry] * count
        return
    for index in range(entry.shape[0]):
        offset = entry.offset + index * entry.stride[0]
        yield TensorRef(entry.shape[1:], entry.dtype, entry.storage, offset, entry.stride[1:])


def _split(entry: Entry, count: int) -> Iterator[Entry]:
    """Yield `count` equal parts along the first axis."""
    if isinstance(entry, LostTensor):
        yield from [entry] * count
        return
    rows = entry.shape[0] // count
    for index in range(count):
        offset = entry.offset + index * rows * entry.stride[0]
        yield TensorRef((rows, *entry.shape[1:]), entry.dtype, entry.storage, offset, entry.stride)


def _pack(tensors: dict[str, Named]) -> Iterator[Problem]:
    """Join the codes and the scales of every MXFP4 matrix under the name of the matrix."""
    for name in [name for name in tensors if name.endswith(f".weight{CODES}")]:
        weight = name.removesuffix(CODES)
        codes, scales = tensors[name], tensors.get(weight + SCALES)
        if scales is None:
            continue  # the codes are reported as unexpected, the matrix as missing
        del tensors[name], tensors[weight + SCALES]
        if weight in tensors:
            yield _double(name, weight, weight)
        elif isinstance(codes, LostTensor) or isinstance(scales, LostTensor):
            tensors[weight] = codes if isinstance(codes, LostTensor) else scales
        elif isinstance(codes, TensorRef) and isinstance(scales, TensorRef) and _fit(codes, scales):
            tensors[weight] = PackedRef(codes, scales)
        else:
            tensors[weight] = LostTensor(name)
            message = (
                f"{printable(name)} ({kind_of(codes)}) and its scales ({kind_of(scales)}) are no MXFP4 matrix: "
                f"codes are uint8 [out, in / {CODES_PER_BYTE}], scales uint8 [out, in / {CODES_PER_SCALE}]"
            )
            yield Problem(kind="shape", name=printable(name), message=message)


def _fit(codes: TensorRef, scales: TensorRef) -> bool:
    per_scale = CODES_PER_SCALE // CODES_PER_BYTE
    return (
        codes.dtype in CODE_DTYPES
        and scales.dtype in SCALE_DTYPES
        and len(codes.shape) == len(scales.shape) == 2
        and codes.shape == (scales.shape[0], scales.shape[1] * per_scale)
    )


def _double(stored_name: str, name: str, other: str) -> Problem:
    shown = printable(stored_name)
    message = f"{shown} and {printable(other)} are both {printable(name)} of the model; remove one"
    return Problem(kind="duplicate", name=shown, message=message)
