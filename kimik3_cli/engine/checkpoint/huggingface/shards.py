"""The tensors of a directory's safetensors files, from the headers alone: what is there, where, and what is wrong.

A safetensors file is 8 bytes of header length, a JSON header, and the numbers. Several files need an index that names
the file of every tensor. Every difference between index and files is a problem of its own, so that nothing is read from
a directory that is not whole.
"""

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import from_json

from kimik3_cli.engine.checkpoint.files import AGAIN, named_file, opened, printable_path, read_json, regular_file
from kimik3_cli.engine.checkpoint.store import Record
from kimik3_cli.engine.checkpoint.stored import ITEM_BYTES, LostTensor, StorageRef, TensorRef, printable, row_major
from kimik3_cli.errors import CheckpointError
from kimik3_cli.results import Problem

INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
METADATA = "__metadata__"
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}


class Shard(NamedTuple):
    """One file: its name, its bytes, and how many tensors it holds."""

    name: str
    bytes: int
    tensors: int


@dataclass(frozen=True, slots=True)
class ShardStore:
    """The safetensors files of a directory: every tensor by its name in the files, and where its numbers begin."""

    path: Path
    files: Mapping[Path, os.stat_result]
    shards: list[Shard]
    entries: Mapping[str, TensorRef | LostTensor]
    places: Mapping[str, tuple[Path, int]]
    problems: list[Problem]

    @property
    def name(self) -> str:
        """The directory in a message: its path on one line, and the size of its files."""
        return named_file(self.path, self.file_size)

    @property
    def file_size(self) -> int:
        """Bytes of all safetensors files."""
        return sum(shard.bytes for shard in self.shards)

    @property
    def checked_records(self) -> list[Record]:
        """None: safetensors has no checksums."""
        return []

    def record_of(self, storage: StorageRef) -> Record:
        """Return the tensor of a file that a storage is."""
        path, start = self.places[storage.key]
        return Record(f"{path.name}/{storage.key}", start, storage.nbytes, 0)

    def location(self, storage: StorageRef) -> tuple[Path, int]:
        """Return the file that holds a storage, and the byte at which its numbers begin."""
        return self.places[storage.key]

    def damaged_records(self) -> list[Record]:
        """None that can be told: safetensors has no checksums."""
        return []


def read_shards(folder: Path) -> ShardStore:
    """Read the headers of all safetensors files of a directory, and its index.

    Raises:
        CheckpointError: there is no safetensors file, or the index is none; all else is listed as problems.
    """
    found = sorted(path.name for path in folder.glob(f"*{SUFFIX}"))
    index = _read_index(folder)
    if not found and index is None:
        raise CheckpointError(f"{printable_path(folder)} holds no {SUFFIX} file; {_other_weights(folder)}")
    reader = _Reader(folder, index)
    for name in sorted({*found, *reader.expected}):
        reader.read(name)
    reader.compare()
    if index is None and len(found) > 1:
        message = f"{INDEX} is missing, and there are {len(found)} {SUFFIX} files; {AGAIN}"
        reader.problems.insert(0, Problem(kind="shard", name=INDEX, message=message))
    return ShardStore(folder, reader.files, reader.shards, reader.entries, reader.places, reader.problems)


def _read_index(folder: Path) -> dict[str, str] | None:
    """Return the file name of every tensor, None when there is no index."""
    path = folder / INDEX
    if not path.exists():
        return None
    content = read_json(path)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{printable_path(path)} has no weight_map object; {AGAIN}")
    for file in {value if isinstance(value, str) else "" for value in weight_map.values()}:
        if not file.endswith(SUFFIX) or Path(file).name != file:
            raise CheckpointError(f"{printable_path(path)} names {printable(repr(file))}, no file of the directory")
    return weight_map


def _other_weights(folder: Path) -> str:
    others = [name for name in ("pytorch_model.bin", "pytorch_model.bin.index.json") if (folder / name).exists()]
    if others:
        return f"it has {others[0]}, which is saved again with safe_serialization=True"
    return "give a checkpoint file, or a directory with config.json and its weights"


class _Reader:
    """Collects what the shards hold, and everything in which they and the index do not agree."""

    def __init__(self, folder: Path, index: Mapping[str, str] | None) -> None:
        self.folder = folder
        self.index = index
        self.expected = Counter((index or {}).values())  # file -> how many tensors the index puts in it
        self.files: dict[Path, os.stat_result] = {}
        self.shards: list[Shard] = []
        self.entries: dict[str, TensorRef | LostTensor] = {}
        self.places: dict[str, tuple[Path, int]] = {}
        self.problems: list[Problem] = []
        self._layouts: dict[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def read(self, file: str) -> None:
        """Take in one file."""
        expected = self.expected[file]
        if self.index is not None and not expected:
            self._report(file, f"{printable(file)} is not named by {INDEX}; remove the one that is stale")
            return
        try:
            self._take(file)
        except CheckpointError as error:
            self._report(file, f"{error}; {INDEX} puts {expected} tensors in it" if expected else str(error))
            self._lose([name for name, where in (self.index or {}).items() if where == file], file)

    def _take(self, file: str) -> None:
        path = self.folder / file
        if not path.exists():
            raise CheckpointError(f"{printable(file)} is missing; {AGAIN}")
        if not path.is_file():
            what = "a folder" if path.is_dir() else "no regular file"
            raise CheckpointError(f"{printable(file)} is {what}, where a {SUFFIX} file should be; {AGAIN}")
        status = regular_file(path)
        header, start = _read_header(path, status)
        self.files[path] = status
        spans = []
        for name, fields in header.items():
            ref, first, last = self._tensor(name, fields)
            spans.append((first, last, name))
            if name in self.places:
                also = self.places[name][0].name
                self._report(name, f"{printable(name)} is in {printable(also)} and in {printable(file)}; remove one")
            elif ref is None:
                kind = printable(repr(fields))
                self._report(name, f"{printable(name)} of {printable(file)} is {kind}, no tensor that kimik3 knows")
                self.entries[name] = LostTensor(file)
            else:
                self.entries[name] = ref
                self.places[name] = path, start + first
        self.shards.append(Shard(file, status.st_size, len(header)))
        self._check_spans(file, sorted(spans), status.st_size - start)

    def _tensor(self, name: str, fields: Any) -> tuple[TensorRef | None, int, int]:
        """Return a tensor and its first and last byte; None when a header says something else than a tensor."""
        first = last = 0
        try:
            first, last = map(_size, fields["data_offsets"])
            dtype, shape = DTYPES[fields["dtype"]], tuple(fields["shape"])
            layout = self._layouts.get(shape)
            if layout is None:
                layout = self._layouts[shape] = tuple(map(_size, shape)), row_major(shape)
        except (TypeError, KeyError, ValueError):
            return None, first, last
        count = prod(shape)
        if last - first != count * ITEM_BYTES[dtype]:
            return None, first, last
        return TensorRef(layout[0], dtype, StorageRef(name, dtype, count), 0, layout[1]), first, last

    def _check_spans(self, file: str, spans: list[tuple[int, int, str]], size: int) -> None:
        """Report tensors that overlap, bytes between them, and tensors that the file is too short for."""
        shown, end, before = printable(file), 0, ""
        for first, last, name in spans:
            if first < end:
                self._report(name, f"{printable(name)} of {shown} overlaps {printable(before)}; {AGAIN}")
            elif first > end:
                self._report(name, f"{shown} has {_bytes(first - end)} before {printable(name)} of no tensor; {AGAIN}")
            end, before = max(end, last), name
        cut = {name for _, last, name in spans if last > size}
        if cut:
            what = f"{shown} is {_bytes(end - size)} too short for the {len(spans)} tensors that it holds"
            self._report(file, f"{what}, {len(cut)} of which are cut off; {AGAIN}")
            self._lose(cut, file)
        elif size > end:
            self._report(file, f"{shown} has {_bytes(size - end)} after the last of its {len(spans)} tensors; {AGAIN}")

    def compare(self) -> None:
        """Report every tensor on which the files and the index differ."""
        if self.index is None:
            return
        paths = {path.name: path for path in self.files}
        named = 0
        for name, file in self.index.items():
            place = self.places.get(name)
            if place is None:
                if name not in self.entries:
                    self._report(name, f"{printable(name)} is not in {printable(file)}, where {INDEX} puts it; {AGAIN}")
                    self.entries[name] = LostTensor(file)
                continue
            named += 1
            if place[0] is not paths.get(file):
                what = f"{printable(name)} is in {printable(place[0].name)}, but {INDEX} puts it in {printable(file)}"
                self._report(name, f"{what}; download both again")
        for name in self.places.keys() - self.index.keys() if named < len(self.places) else ():
            found = printable(self.places[name][0].name)
            self._report(name, f"{printable(name)} is in {found}, but {INDEX} does not name it; download both again")

    def _lose(self, names: Iterable[str], file: str) -> None:
        for name in names:
            if name not in self.places or self.places[name][0].name == file:
                self.entries[name] = LostTensor(file)

    def _report(self, name: str, message: str) -> None:
        self.problems.append(Problem(kind="shard", name=printable(name), message=message))


def _bytes(count: int) -> str:
    return f"{count} byte" if count == 1 else f"{count} bytes"


def _size(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(value)
    return value


def _read_header(path: Path, status: os.stat_result) -> tuple[dict[str, Any], int]:
    """Return the tensors of a safetensors file as its header describes them, and the byte after the header."""
    shown = named_file(path, status.st_size)
    with opened(path) as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(MAX_HEADER_BYTES, status.st_size - 8):
            what = "is a Git LFS pointer; run git lfs pull" if start.startswith(b"version ") else f"is cut off; {AGAIN}"
            raise CheckpointError(f"{shown} has no safetensors header: it {what}")
        content = file.read(length)
    try:
        header = from_json(content)
    except ValueError as error:
        raise CheckpointError(
            f"{shown} has a safetensors header that is no JSON ({printable(str(error))}); {AGAIN}"
        ) from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{shown} has a safetensors header that is no object; {AGAIN}")
    header.pop(METADATA, None)
    return header, 8 + length
