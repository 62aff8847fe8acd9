"""New files and folders that take their place whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a hidden path beside the target to write a file or a folder at; when that is done, it becomes the target.

    Whatever goes wrong before, an interrupt included, the target stays as it was and nothing else is left. A file
    replaces a file in one step. POSIX has no such step for folders: the old one is moved aside, the new one moved in,
    then the old one removed.

    Args:
        target: no symbolic link, so that the file that it leads to is replaced and not the link.

    Raises:
        OSError: the target cannot be replaced.
    """
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
    replaced = target.with_name(f".{target.name}.{os.getpid()}.replaced")
    try:
        yield unfinished
        if unfinished.is_dir() and target.exists():
            _swap(unfinished, target, replaced)
        else:
            os.replace(unfinished, target)
        sync(target.parent)
    finally:
        _remove(unfinished)
        _remove(replaced)


def sync(path: Path) -> None:
    """Make a file's content, or a folder's names, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _swap(folder: Path, target: Path, aside: Path) -> None:
    try:
        os.rename(target, aside)
        os.rename(folder, target)
    finally:
        if aside.exists() and not target.exists():
            os.rename(aside, target)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
