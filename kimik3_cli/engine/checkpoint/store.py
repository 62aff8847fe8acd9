"""What every kind of checkpoint, a .pt file or a Hugging Face directory, says of where its numbers lie."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from kimik3_cli.engine.checkpoint.stored import StorageRef


class Record(NamedTuple):
    """One piece of a file that holds numbers: a record of a zip archive, a tensor of a shard.

    `offset` is the byte at which it begins, in a zip archive with a header of its own; `crc` is 0 where there is no
    checksum.
    """

    name: str
    offset: int
    size: int
    crc: int


class Store(Protocol):
    """Where the numbers of a checkpoint's tensors lie. See `reading` for how they are read."""

    @property
    def path(self) -> Path:
        """The file or directory."""

    @property
    def name(self) -> str:
        """The checkpoint in a message: its path on one line, and its size."""

    @property
    def file_size(self) -> int:
        """Bytes of all files."""

    @property
    def files(self) -> Mapping[Path, os.stat_result]:
        """Every file, as it was when its structure was read."""

    @property
    def checked_records(self) -> Sequence[Record]:
        """The records that have a checksum."""

    def record_of(self, storage: StorageRef) -> Record:
        """Return the record that holds a storage."""

    def location(self, storage: StorageRef) -> tuple[Path, int]:
        """Return the file that holds a storage, and the byte at which its numbers begin.

        Raises:
            CheckpointError: the file is damaged.
        """

    def damaged_records(self) -> Sequence[Record]:
        """Read the whole checkpoint and return the records that differ from their checksums.

        Raises:
            CheckpointError: a file cannot be read.
        """
