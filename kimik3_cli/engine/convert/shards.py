"""Writes safetensors files: shards of limited size, a tensor at a time."""

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kimik3_cli.engine.checkpoint.store import Store
from kimik3_cli.engine.checkpoint.stored import ITEM_BYTES
from kimik3_cli.engine.convert.outgoing import Outgoing, content
from kimik3_cli.engine.replacing import sync

MAX_SHARD_BYTES = 5_000_000_000
INDEX = "model.safetensors.index.json"
DTYPE_CODES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
HEADER_ALIGNMENT = 8
Told = Callable[[Outgoing], None]


def write_shards(
    folder: Path, tensors: Sequence[Outgoing], store: Store, told: Told, max_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write the tensors, in their order, to one file or to as many as the limit asks for, with an index.

    Args:
        folder: an empty folder.
        tensors: what to write.
        store: where the numbers are.
        told: is given each tensor before it is written.
        max_bytes: of the tensors in one file; a larger tensor has a file to itself.

    Raises:
        CheckpointError: the source cannot be read.
        RequestError: a number is too large for its new dtype.
        OSError: a file cannot be written.
    """
    shards = _planned(tensors, max_bytes)
    names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        _write_shard(folder / name, shard, store, told)
    if len(shards) > 1:
        weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        total = sum(tensor.nbytes for tensor in tensors)
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file as the released ones are: sorted, indented."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    sync(path)


def _planned(tensors: Sequence[Outgoing], max_bytes: int) -> list[list[Outgoing]]:
    shards: list[list[Outgoing]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _write_shard(path: Path, tensors: Sequence[Outgoing], store: Store, told: Told) -> None:
    # wide dtypes first, so that every tensor begins at a multiple of its item size
    tensors = sorted(tensors, key=lambda tensor: -ITEM_BYTES[tensor.dtype])
    with path.open("wb") as file:
        file.write(_header(tensors))
        for tensor in tensors:
            told(tensor)
            for block in content(store, tensor):
                file.write(block)
    sync(path)


def _header(tensors: Sequence[Outgoing]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        end = start + tensor.nbytes
        dtype = DTYPE_CODES[tensor.dtype]
        entries[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
