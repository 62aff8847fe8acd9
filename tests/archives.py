"""Takes .pt files apart and puts them together again, so that tests can build every kind of broken one."""

import io
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path

STORED, DEFLATED = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED


def read_records(path: Path) -> dict[str, bytes]:
    """The records of an archive by their full names."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write_records(path: Path, records: Mapping[str, bytes], compression: int = STORED) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in records.items():
            archive.writestr(name, content)


def edit_records(path: Path, changes: Mapping[str, bytes | None]) -> None:
    """Replace records by the ends of their names (None: leave out) and add those that no name ends in."""
    records = read_records(path)
    root = next(iter(records)).partition("/")[0]
    for end, content in changes.items():
        names = [name for name in records if name.endswith("/" + end)] or [f"{root}/{end}"]
        for name in names:
            records.pop(name, None)
            if content is not None:
                records[name] = content
    write_records(path, records)


def write_pickle(path: Path, pickled: bytes) -> None:
    """An archive that holds nothing but a pickle."""
    write_records(path, {"archive/data.pkl": pickled, "archive/byteorder": b"little", "archive/version": b"3\n"})


def plain_pickle(value: object) -> bytes:
    """A pickle of a plain value in the protocol of torch.save."""
    buffer = io.BytesIO()
    pickle.Pickler(buffer, protocol=2).dump(value)
    return buffer.getvalue()


def flip(path: Path, position: int, value: int) -> None:
    """Overwrite one byte of a file in place."""
    with path.open("r+b") as file:
        file.seek(position)
        file.write(bytes([value]))
