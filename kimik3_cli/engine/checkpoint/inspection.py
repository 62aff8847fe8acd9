"""What a checkpoint holds, counted and checked, without reading its weights; torch is loaded only for a deep look."""

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from kimik3_cli.engine.checkpoint.contents import (
    WEIGHT_DTYPES,
    Contents,
    read_contents,
    real_values,
    tie_problem,
)
from kimik3_cli.engine.checkpoint.files import printable_path
from kimik3_cli.engine.checkpoint.store import Record
from kimik3_cli.engine.checkpoint.stored import (
    StorageRef,
    StoredTensor,
    TensorRef,
    children,
    kind_of,
    printable,
    shown_key,
)
from kimik3_cli.engine.checkpoint.tensors import EMBEDDING, HEAD, count_parameters, shape_fits
from kimik3_cli.engine.memory import memory_needs
from kimik3_cli.results import (
    DtypeUse,
    InspectResult,
    Problem,
    ShardInfo,
    SkippedTensors,
    TensorInfo,
    TrainerEntry,
)

# A container of the trainer state with more entries than this, or nested deeper, is one line with its sum.
LISTED_ENTRIES, LISTED_DEPTH = 64, 8
NAMED_USERS = 3


def inspect_checkpoint(path: str | os.PathLike[str], *, tensors: bool = False, deep: bool = False) -> InspectResult:
    """Inspect a checkpoint; wrong tensors are listed as problems of the result.

    Args:
        path: a file of format version 7, or a Hugging Face directory.
        tensors: list every tensor of the model dictionary.
        deep: also read the file: compare every record's checksum, count non-finite values of the model's tensors, and
            compare the two tables of a tied head where checksums alone cannot tell.

    Raises:
        CheckpointError: it is neither.
        ConfigError: its configuration is wrong, so that it is unknown which tensors there should be.
    """
    contents = read_contents(path)
    config = contents.config
    parameters = count_parameters(config, contents.specs)
    dtypes = _dtype_uses(contents)
    stored_bytes = sum(use.bytes for use in dtypes)
    optional: dict[str, Any] = {"tensors": _tensor_infos(contents)} if tensors else {}
    problems = list(contents.problems)
    if deep:
        damaged = contents.store.damaged_records()
        problems += [*_checksum_problems(contents, damaged), *_value_problems(contents, damaged)]
        optional["records_verified"] = len(contents.store.checked_records)
    if contents.format_version is None:
        optional["shards"] = [
            ShardInfo(name=printable(shard.name), bytes=shard.bytes, tensors=shard.tensors) for shard in contents.shards
        ]
        skipped = contents.skipped.values()
        optional["skipped"] = SkippedTensors(tensors=len(skipped), bytes=sum(ref.nbytes for ref in skipped))
    return InspectResult(
        path=printable_path(path),
        file_size=contents.store.file_size,
        format_version=contents.format_version,
        config=config.to_dict(),
        training_kda_backend=contents.training_kda_backend,
        step=contents.step,
        stripped_prefix=contents.prefix,
        tokenizer=contents.tokenizer,
        parameters=parameters,
        dtypes=dtypes,
        bytes=stored_bytes,
        tied_embeddings=config.tie_word_embeddings,
        trainer_state=_trainer_state(contents.trainer_state),
        memory=memory_needs(config, parameters.total, stored_bytes),
        problems=problems,
        **optional,
    )


def _distinct(refs: Iterable[StoredTensor]) -> Iterable[StoredTensor]:
    """Drop references to numbers that were already seen, such as a tied head beside its embedding."""
    return {ref.view: ref for ref in refs}.values()


def _tensor_infos(contents: Contents) -> list[TensorInfo]:
    return [
        TensorInfo(name=printable(name), shape=list(ref.shape), dtype=ref.dtype, bytes=ref.nbytes)
        for name, ref in contents.entries.items()
        if isinstance(ref, StoredTensor)
    ]


def _dtype_uses(contents: Contents) -> list[DtypeUse]:
    """Sum up the model's tensors by dtype, in order of first appearance."""
    tensors: Counter[str] = Counter()
    parameters: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for name, ref in contents.tensors.items():
        tensors[ref.dtype] += 1
        parameters[ref.dtype] += _parameter_count(contents, name, ref)
    for ref in _distinct(contents.tensors.values()):
        sizes[ref.dtype] += ref.nbytes
    return [DtypeUse(dtype=d, tensors=tensors[d], parameters=parameters[d], bytes=sizes[d]) for d in tensors]


def _parameter_count(contents: Contents, name: str, ref: StoredTensor) -> int:
    """Count one stored tensor: a tied head is its embedding, and the padding of `A_log` is no parameter."""
    if name == HEAD and contents.config.tie_word_embeddings:
        return 0
    spec = contents.specs.get(name)
    return prod(spec.shape) if spec is not None and shape_fits(name, spec.shape, ref.shape) else ref.numel


def _trainer_state(state: Mapping[str, object]) -> list[TrainerEntry]:
    entered: set[int] = set()
    return [entry for name, value in state.items() for entry in _trainer_entries(name, value, entered)]


def _trainer_entries(name: str, value: object, entered: set[int], depth: int = 0) -> Iterator[TrainerEntry]:
    """List one value of the trainer state; what the file holds in several places is followed in the first only."""
    if isinstance(value, str | int | float | None):
        yield TrainerEntry(name=name, kind=kind_of(value), bytes=0, value=_plain_value(value))
        return
    held = list(children(value))
    is_short = 0 < len(held) <= LISTED_ENTRIES and depth < LISTED_DEPTH
    if is_short and isinstance(value, dict | list | tuple) and id(value) not in entered:
        entered.add(id(value))
        for key, child in held:
            yield from _trainer_entries(f"{name}.{shown_key(key)}", child, entered, depth + 1)
    else:
        kind = kind_of(value) + (f" of {len(held)}" if isinstance(value, dict | list | tuple | set) else "")
        yield TrainerEntry(name=name, kind=kind, bytes=_total_bytes(value, entered))


def _plain_value(value: str | int | float | None) -> str | int | float | None:
    """Return a value that JSON can carry: text on one line, and `nan` and `inf` as text."""
    if isinstance(value, str):
        return printable(value)
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _total_bytes(value: object, entered: set[int]) -> int:
    todo, total = [value], 0
    while todo:
        current = todo.pop()
        if isinstance(current, TensorRef | StorageRef):
            total += current.nbytes
        elif isinstance(current, bytes):
            total += len(current)
        elif id(current) not in entered:
            entered.add(id(current))
            todo += [child for _, child in children(current)]
    return total


def _checksum_problems(contents: Contents, damaged: Sequence[Record]) -> Iterator[Problem]:
    """Name each damaged record with the tensors that lie in it."""
    users: dict[str, list[str]] = {}
    for name, ref in contents.tensors.items():
        for storage in ref.storages:
            users.setdefault(contents.store.record_of(storage).name, []).append(name)
    for record in damaged:
        inside = [printable(name) for name in users.get(record.name, [])]
        more = f" and {len(inside) - NAMED_USERS} more" if len(inside) > NAMED_USERS else ""
        holding = f" ({', '.join(inside[:NAMED_USERS])}{more})" if inside else ""
        message = f"{printable(record.name)}{holding} differs from its checksum; the file is damaged, copy it again"
        yield Problem(kind="checksum", name=printable(record.name), message=message)


def _value_problems(contents: Contents, damaged: Sequence[Record]) -> Iterator[Problem]:
    """Read the model's undamaged tensors one at a time and yield non-finite values, and a tied head that differs."""
    from kimik3_cli.engine.checkpoint.reading import count_non_finite, equal_values

    store = contents.store
    sound = {
        name: ref
        for name, ref in contents.tensors.items()
        if not any(store.record_of(storage) in damaged for storage in ref.storages)
    }
    for name, spec in contents.specs.items():
        ref = sound.get(name)
        if ref is None or not shape_fits(name, spec.shape, ref.shape) or ref.dtype not in WEIGHT_DTYPES:
            continue
        count = count_non_finite(store, real_values(spec, ref))
        if count:
            message = (
                f"{name} has {count} NaN or infinite values of {prod(spec.shape)}; the model cannot answer with it"
            )
            yield Problem(kind="non_finite", name=name, message=message)
    if contents.undecided_tie and {EMBEDDING, HEAD} <= set(sound) and not equal_values(store, *contents.undecided_tie):
        yield tie_problem()
