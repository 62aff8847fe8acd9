"""Files that are read: found, opened, read in pieces, mapped; refused with a reason when that cannot be. No torch."""

import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from pydantic_core import from_json

from kimik3_cli.errors import CheckpointError

BLOCK_BYTES = 1 << 20
MAX_JSON_BYTES = 1 << 30
AGAIN = "download or copy it again"
IDENTITY = ("st_dev", "st_ino", "st_size", "st_mtime_ns")


def named_file(path: Path, file_size: int) -> str:
    """Name a file in a message: its path on one line, and its size."""
    return f"{printable_path(path)} ({file_size} bytes)"


def printable_path(path: str | os.PathLike[str]) -> str:
    """Return a path on one line."""
    text = os.fspath(path)
    return text if text.isprintable() else repr(text)


def regular_file(path: Path) -> os.stat_result:
    """Return what the system says of a file.

    Raises:
        CheckpointError: there is no such file, or it is something else.
    """
    name = printable_path(path)
    try:
        status = path.stat()
    except FileNotFoundError:
        raise CheckpointError(f"{name} does not exist; give the path of a checkpoint file or directory") from None
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    if stat.S_ISDIR(status.st_mode):
        raise CheckpointError(f"{name} is a directory; give the path of a file")
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{name} is not a regular file; give the path of a checkpoint file or directory")
    return status


def unreadable(path: Path, error: OSError | ValueError) -> CheckpointError:
    """Return the error that says why a file cannot be read."""
    if isinstance(error, PermissionError):
        reason = "permission denied; make it readable for the user who runs kimik3"
    else:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
    return CheckpointError(f"{printable_path(path)} cannot be read: {reason}")


@contextmanager
def opened(path: Path, status: os.stat_result | None = None) -> Iterator[BufferedReader]:
    """Open a file to read it; with `status`, only if it still is the file, with the content, that had it.

    Raises:
        CheckpointError: it cannot be read, or was replaced.
    """
    try:
        with path.open("rb") as file:
            if status is not None and not _same_file(os.fstat(file.fileno()), status):
                raise CheckpointError(
                    f"{named_file(path, status.st_size)} was replaced while it was read; load it again"
                )
            yield file
    except OSError as error:
        raise unreadable(path, error) from None


def _same_file(first: os.stat_result, second: os.stat_result) -> bool:
    return all(getattr(first, field) == getattr(second, field) for field in IDENTITY)


def blocks(file: BufferedReader, start: int, count: int) -> Iterator[bytearray]:
    """Yield `count` bytes from byte `start` on, in pieces of at most `BLOCK_BYTES`.

    Raises:
        EOFError: the file ends before that.
    """
    file.seek(start)
    while count:
        block = bytearray(min(count, BLOCK_BYTES))
        if file.readinto(block) < len(block):
            raise EOFError("the file ends early")
        count -= len(block)
        yield block


def read_json(path: Path) -> object:
    """Read a JSON file.

    Raises:
        CheckpointError: it cannot be read, is no JSON, or is larger than `MAX_JSON_BYTES`.
    """
    name = named_file(path, regular_file(path).st_size)
    with opened(path) as file:
        content = file.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise CheckpointError(f"{name} is too large for a JSON file; {AGAIN}")
    try:
        value: object = from_json(content)
        return value
    except ValueError as error:
        reason = "a Git LFS pointer, run git lfs pull" if content.startswith(b"version ") else str(error)
        raise CheckpointError(f"{name} is no JSON ({reason}); {AGAIN}") from None


def mapped(path: Path, status: os.stat_result) -> mmap.mmap:
    """Map a whole file; what is written to the mapping stays there and never reaches the file.

    Raises:
        CheckpointError: it cannot be mapped, or is no longer the file that `status` tells of.
    """
    with opened(path, status) as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
