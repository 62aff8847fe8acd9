"""The structure of a .pt file, read without torch: the zip directory and the pickle of a `torch.save` archive.

Of a file of any size only the directory, the pickle and a few bytes of headers are read. A file that is something else
is refused with what it is and what to do.
"""

import os
import stat
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from kimik3_cli.engine.checkpoint.diagnosis import what_it_is
from kimik3_cli.engine.checkpoint.stored import Global, Instance, StorageRef, children, kind_of, printable
from kimik3_cli.engine.checkpoint.unpickling import unpickle
from kimik3_cli.errors import CheckpointError

LOCAL_HEADER_BYTES = 30
BLOCK_BYTES = 1 << 20
LISTED = 20
# What zipfile raises for directories that are damaged in various places.
ZIP_DAMAGE = (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, LookupError, OverflowError, EOFError)


class Record(NamedTuple):
    """One file inside the zip archive."""

    name: str
    header_offset: int
    size: int
    crc: int


@dataclass(frozen=True, slots=True)
class Archive:
    """A `torch.save` archive: the object in it, and the records that hold its tensors' numbers."""

    path: Path
    file_size: int
    content: Any
    storages: Mapping[str, StorageRef]
    records: Mapping[str, Record]
    root: str
    has_checksums: bool

    def record_of(self, storage: StorageRef) -> Record:
        """Return the record that holds a storage."""
        return self.records[f"{self.root}/data/{storage.key}"]

    def checksum_matches(self, record: Record) -> bool:
        """Read one record in blocks and compare its CRC-32 with the directory's.

        Raises:
            CheckpointError: the record cannot be read.
        """
        with _opened(self.path) as file, _damage_reported(self.path, self.file_size):
            crc = 0
            for block in _blocks(file, record):
                crc = zlib.crc32(block, crc)
        return crc == record.crc


def read_archive(path: str | os.PathLike[str]) -> Archive:
    """Read the structure of a `torch.save` file.

    Raises:
        CheckpointError: naming the path, its size, what the file is instead, and what to do. An object of a type that
            needs code to be read is named by type and place.
    """
    path = Path(path)
    file_size = _regular_file_size(path)
    with _opened(path) as file:
        refusal = what_it_is(file, file_size)
        if refusal:
            raise CheckpointError(f"{named(path, file_size)} {refusal}")
        with _damage_reported(path, file_size):
            records = _directory(file)
            root = _root(records)
            has_checksums = any(record.crc for record in records.values())
            _check_byte_order(file, records.get(f"{root}/byteorder"))
            pickled = _content(file, records[f"{root}/data.pkl"], has_checksums)
    try:
        content, storages, refused = unpickle(pickled)
    except ValueError as error:
        what = f"holds a damaged pickle ({printable(str(error))}); copy the file again or save it again with torch.save"
        raise CheckpointError(f"{named(path, file_size)} {what}") from None
    if refused:
        raise CheckpointError(f"{named(path, file_size)} {_foreign_types(content, refused)}")
    archive = Archive(path, file_size, content, storages, records, root, has_checksums)
    _check_records(archive)
    return archive


def named(path: Path, file_size: int) -> str:
    """Name a file in a message: its path on one line, and its size."""
    return f"{printable_path(path)} ({file_size} bytes)"


def printable_path(path: str | os.PathLike[str]) -> str:
    """Return a path on one line."""
    text = os.fspath(path)
    return text if text.isprintable() else repr(text)


def _regular_file_size(path: Path) -> int:
    name = printable_path(path)
    try:
        status = path.stat()
    except FileNotFoundError:
        raise CheckpointError(f"{name} does not exist; give the path of a checkpoint file") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{name} cannot be read: {_reason(error)}") from None
    if stat.S_ISDIR(status.st_mode):
        raise CheckpointError(f"{name} is a directory; give the path of a checkpoint file inside it")
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{name} is not a regular file; give the path of a checkpoint file")
    return status.st_size


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        remedy = "; make it readable for you" if isinstance(error, PermissionError) else ""
        raise CheckpointError(f"{printable_path(path)} cannot be read: {_reason(error)}{remedy}") from None


def _reason(error: OSError | ValueError) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()


@contextmanager
def _damage_reported(path: Path, file_size: int) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{named(path, file_size)} {error}") from None
    except ZIP_DAMAGE as error:
        detail = printable(str(error) or type(error).__name__)
        remedy = "it is damaged or was cut off (an interrupted copy, a full disk); copy or save it again"
        raise CheckpointError(f"{named(path, file_size)} is an incomplete zip archive ({detail}): {remedy}") from None


def _directory(file: BinaryIO) -> dict[str, Record]:
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    records = {}
    for entry in entries:
        if entry.filename in records:
            raise CheckpointError(f"holds two records named {entry.filename!r}; save it again with torch.save")
        if entry.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(f"holds a compressed record {entry.filename!r}; save it again with torch.save")
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


def _check_byte_order(file: BinaryIO, record: Record | None) -> None:
    order = b"little" if record is None else _content(file, record, checked=False)
    if order != b"little":
        raise CheckpointError(f"has byte order {order[:20]!r}; save it again on a little-endian machine")


def _content(file: BinaryIO, record: Record, checked: bool) -> bytes:
    content = b"".join(_blocks(file, record))
    if checked and zlib.crc32(content) != record.crc:
        raise CheckpointError(f"has a wrong checksum in {record.name!r}: it is damaged; copy or save it again")
    return content


def _blocks(file: BinaryIO, record: Record) -> Iterator[bytes]:
    """Yield the bytes of one uncompressed record."""
    file.seek(record.header_offset)
    header = file.read(LOCAL_HEADER_BYTES)
    if len(header) < LOCAL_HEADER_BYTES or not header.startswith(b"PK\x03\x04"):
        raise ValueError(f"no record at byte {record.header_offset}")
    file.seek(int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little"), os.SEEK_CUR)
    left = record.size
    while left:
        block = file.read(min(left, BLOCK_BYTES))
        if not block:
            raise EOFError(f"record {record.name!r} ends early")
        left -= len(block)
        yield block


def _foreign_types(content: object, refused: list[str]) -> str:
    places = [f"a {printable(value.type_name)} under {place}" for place, value in _refused_values(content)]
    listed = places or [f"a reference to {printable(name)}" for name in dict.fromkeys(refused)]
    more = f" and {len(listed) - LISTED} more" if len(listed) > LISTED else ""
    return (
        f"holds {', '.join(listed[:LISTED])}{more}; such objects need code to be read, so save "
        f"{_plain_form(listed[0])}"
    )


def _refused_values(content: object) -> Iterator[tuple[str, Global | Instance]]:
    """Yield (place, value) of every outermost value that torch would refuse; each container is entered once."""
    todo: list[tuple[str, object]] = [("", content)]
    entered: set[int] = set()
    while todo:
        place, value = todo.pop()
        if isinstance(value, Global | Instance) and value.refused:
            yield place or "the top level", value
        elif id(value) not in entered:
            entered.add(id(value))
            for key, child in children(value):
                todo.append((f"{place}.{printable(str(key))}" if place else repr(key), child))


def _plain_form(described: str) -> str:
    if described.startswith("a numpy.ndarray"):
        return "it as a tensor: torch.from_numpy(x)"
    if described.startswith("a numpy."):
        return "it as a plain number: float(x) or int(x)"
    if described.startswith("a pathlib."):
        return "it as a string: str(x)"
    if described.startswith(("a argparse.Namespace", "a types.SimpleNamespace")):
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
        raise CheckpointError(f"{named(archive.path, archive.file_size)} lacks tensor records: {which}{more}; save it again")
