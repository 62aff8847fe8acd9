"""The structure of a .pt file, read without torch: the zip directory and the pickle of a `torch.save` archive.

Of a file of any size only the directory, the pickle and a few bytes of headers are read. A file that is something else
is refused with what it is and what to do.
"""

import os
import struct
import zipfile
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from kimik3_cli.engine.checkpoint.diagnosis import what_it_is
from kimik3_cli.engine.checkpoint.files import blocks, named_file, opened, regular_file
from kimik3_cli.engine.checkpoint.store import Record
from kimik3_cli.engine.checkpoint.stored import Global, Instance, StorageRef, children, printable, shown_key
from kimik3_cli.engine.checkpoint.unpickling import unpickle
from kimik3_cli.errors import CheckpointError

LOCAL_HEADER_BYTES = 30
ENCRYPTED = 1  # a bit of a record's flags
LISTED = 20
RECORD_DAMAGE = (ValueError, EOFError)
# What zipfile raises for directories that are damaged in various places.
ZIP_DAMAGE = (zipfile.BadZipFile, RuntimeError, ValueError, LookupError, OverflowError, EOFError, struct.error)


@dataclass(frozen=True, slots=True)
class Archive:
    """A `torch.save` archive: the object in it, and the records that hold its tensors' numbers."""

    path: Path
    status: os.stat_result
    content: Any
    storages: Mapping[str, StorageRef]
    records: Mapping[str, Record]
    root: str

    @property
    def file_size(self) -> int:
        """Bytes of the whole file."""
        return self.status.st_size

    @property
    def name(self) -> str:
        """The file in a message: its path on one line, and its size."""
        return named_file(self.path, self.file_size)

    @property
    def files(self) -> Mapping[Path, os.stat_result]:
        """The file, as it was when its structure was read."""
        return {self.path: self.status}

    @property
    def checked_records(self) -> list[Record]:
        """The records that have a checksum."""
        return [record for record in self.records.values() if record.crc]

    def record_of(self, storage: StorageRef) -> Record:
        """Return the record that holds a storage."""
        return self.records[f"{self.root}/data/{storage.key}"]

    def location(self, storage: StorageRef) -> tuple[Path, int]:
        """Return the file, and the byte at which the numbers of a storage begin.

        Raises:
            CheckpointError: the record's own header is damaged.
        """
        with opened(self.path, self.status) as file, _damage_reported(self.path, self.file_size):
            return self.path, _first_byte(file, self.record_of(storage))

    def damaged_records(self) -> list[Record]:
        """Read the whole file and return the records that differ from their CRC-32.

        Raises:
            CheckpointError: the file cannot be read.
        """
        return [record for record in self.checked_records if not self._is_intact(record)]

    def _is_intact(self, record: Record) -> bool:
        crc = 0
        try:
            with opened(self.path, self.status) as file:
                for block in _blocks(file, record):
                    crc = zlib.crc32(block, crc)
        except RECORD_DAMAGE:
            return False
        return crc == record.crc


def read_archive(path: str | os.PathLike[str]) -> Archive:
    """Read the structure of a `torch.save` file.

    Raises:
        CheckpointError: naming the path, its size, what the file is instead, and what to do. An object of a type that
            needs code to be read is named by type and place.
    """
    path = Path(path)
    status = regular_file(path)
    file_size = status.st_size
    with opened(path) as file:
        refusal = what_it_is(file, file_size)
        if refusal:
            raise CheckpointError(f"{named_file(path, file_size)} {refusal}")
        with _damage_reported(path, file_size):
            records = _directory(file)
            root = _root(records)
            _check_byte_order(file, records.get(f"{root}/byteorder"))
            pickled = _content(file, records[f"{root}/data.pkl"])
    try:
        content, storages, refused = unpickle(pickled)
    except ValueError as error:
        what = f"holds a damaged pickle ({printable(str(error))}); copy the file again or save it again with torch.save"
        raise CheckpointError(f"{named_file(path, file_size)} {what}") from None
    if refused:
        raise CheckpointError(f"{named_file(path, file_size)} {_foreign_types(content, refused)}")
    archive = Archive(path, status, content, storages, records, root)
    _check_records(archive)
    return archive


@contextmanager
def _damage_reported(path: Path, file_size: int) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{named_file(path, file_size)} {error}") from None
    except ZIP_DAMAGE as error:
        detail = printable(str(error) or type(error).__name__)
        remedy = "it is damaged or was cut off (an interrupted copy, a full disk); copy or save it again"
        raise CheckpointError(
            f"{named_file(path, file_size)} is an incomplete zip archive ({detail}): {remedy}"
        ) from None


def _directory(file: BufferedReader) -> dict[str, Record]:
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    records = {}
    for entry in entries:
        if entry.filename in records:
            raise CheckpointError(f"holds two records named {entry.filename!r}; save it again with torch.save")
        if entry.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(f"holds a compressed record {entry.filename!r}; save it again with torch.save")
        if entry.flag_bits & ENCRYPTED:
            raise CheckpointError(f"holds an encrypted record {entry.filename!r}; save it again with torch.save")
        records[entry.filename] = Record(entry.filename, entry.header_offset, entry.file_size, entry.CRC)
    return records


def _root(records: Mapping[str, Record]) -> str:
    roots = [name.removesuffix("/data.pkl") for name in records if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(roots) != 1:
        some = ", ".join(repr(name) for name in list(records)[:3]) or "nothing"
        raise CheckpointError(f"is a zip archive without a data.pkl, so no torch.save file; it holds {printable(some)}")
    if f"{roots[0]}/constants.pkl" in records:
        raise CheckpointError("is a TorchScript archive; save the checkpoint dictionary with torch.save instead")
    return roots[0]


def _check_byte_order(file: BufferedReader, record: Record | None) -> None:
    order = b"little" if record is None else _content(file, record)
    if order != b"little":
        raise CheckpointError(f"has byte order {order[:20]!r}; save it again on a little-endian machine")


def _content(file: BufferedReader, record: Record) -> bytes:
    content = b"".join(_blocks(file, record))
    if record.crc and zlib.crc32(content) != record.crc:
        raise CheckpointError(f"has a wrong checksum in {record.name!r}: it is damaged; copy or save it again")
    return content


def _blocks(file: BufferedReader, record: Record) -> Iterator[bytearray]:
    """Yield the bytes of one uncompressed record."""
    return blocks(file, _first_byte(file, record), record.size)


def _first_byte(file: BufferedReader, record: Record) -> int:
    """Return where a record's content begins: after a header that repeats its name."""
    file.seek(record.offset)
    header = file.read(LOCAL_HEADER_BYTES)
    if len(header) < LOCAL_HEADER_BYTES or not header.startswith(b"PK\x03\x04"):
        raise ValueError(f"no record at byte {record.offset}")
    names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return record.offset + LOCAL_HEADER_BYTES + names


def _foreign_types(content: object, refused: list[str]) -> str:
    found = [f"{printable(value.type_name)} under {place!r}" for place, value in _refused_values(content)]
    listed = found or [printable(name) for name in dict.fromkeys(refused)]
    more = f" and {len(listed) - LISTED} more" if len(listed) > LISTED else ""
    which = ", ".join(listed[:LISTED])
    return f"holds {which}{more}; reading such an object would run code, so save {_plain_form(listed[0])}"


def _refused_values(content: object) -> Iterator[tuple[str, Global | Instance]]:
    """Yield (place, value) of every outermost value that torch would refuse; each container is entered once."""
    todo: deque[tuple[str, object]] = deque([("", content)])
    entered: set[int] = set()
    while todo:
        place, value = todo.popleft()
        if isinstance(value, Global | Instance) and value.refused:
            yield place, value
        elif id(value) not in entered:
            entered.add(id(value))
            for key, child in children(value):
                todo.append((f"{place}.{shown_key(key)}" if place else shown_key(key), child))


def _plain_form(type_name: str) -> str:
    if type_name.startswith("numpy.ndarray"):
        return "it as a tensor: torch.from_numpy(x)"
    if type_name.startswith("numpy."):
        return "it as a plain number: float(x) or int(x)"
    if type_name.startswith("pathlib."):
        return "it as a string: str(x)"
    if type_name.startswith(("argparse.Namespace", "types.SimpleNamespace")):
        return "it as a dictionary: vars(x)"
    return "plain containers, numbers, strings and tensors only"


def _check_records(archive: Archive) -> None:
    """Refuse storages whose record is absent or too short."""
    broken = []
    for key, storage in archive.storages.items():
        record = archive.records.get(f"{archive.root}/data/{key}")
        if record is None:
            broken.append(f"data/{printable(key)} is missing")
        elif record.size < storage.nbytes:
            broken.append(f"data/{printable(key)} has {record.size} of {storage.nbytes} bytes")
    if broken:
        more = f" and {len(broken) - LISTED} more" if len(broken) > LISTED else ""
        which = ", ".join(broken[:LISTED])
        raise CheckpointError(f"{archive.name} lacks tensor records: {which}{more}; save it again")
