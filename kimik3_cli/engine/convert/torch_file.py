"""Writes a file of `torch.save`, a tensor at a time: torch itself would need all of them at once.

The format is torch's own: a zip archive of uncompressed records, `data.pkl` with the object and `data/KEY` with the
numbers of each tensor, which begin at multiples of 64 bytes so that they can be mapped.
"""

import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import torch
from torch._utils import _rebuild_tensor_v2

from kimik3_cli.engine.checkpoint.store import Store
from kimik3_cli.engine.convert.outgoing import Outgoing, content
from kimik3_cli.engine.replacing import sync

ROOT = "archive"
PROTOCOL = 2
ALIGNMENT = 64
LOCAL_HEADER_BYTES, ZIP64_BYTES, EXTRA_HEADER_BYTES = 30, 20, 4
FILLER = b"FB"  # torch's mark of the extra field that fills a header up
STORAGE_TYPES = {
    "float64": torch.DoubleStorage,
    "float32": torch.FloatStorage,
    "bfloat16": torch.BFloat16Storage,
    "float16": torch.HalfStorage,
}


def write_torch_file(
    path: Path,
    entries: Mapping[str, Any],
    tensors: Mapping[str, Outgoing],
    store: Store,
    told: Callable[[Outgoing], None],
) -> None:
    """Write a dictionary of `entries` and, under the key `model`, the tensors.

    Args:
        path: the file.
        entries: plain containers, numbers, strings and None.
        tensors: name -> tensor.
        store: where the numbers are.
        told: is given each tensor before it is written.

    Raises:
        CheckpointError: the source cannot be read.
        RequestError: a number is too large for its new dtype.
        OSError: the file cannot be written.
    """
    stand_ins = {name: _Tensor(str(key), tensor) for key, (name, tensor) in enumerate(tensors.items())}
    with path.open("wb") as file, zipfile.ZipFile(file, "w") as archive:
        for name, data in (
            ("data.pkl", _pickled({**entries, "model": stand_ins})),
            ("byteorder", b"little"),
            ("version", b"3\n"),
        ):
            with _record(archive, file.tell(), name, len(data)) as record:
                record.write(data)
        for tensor in stand_ins.values():
            told(tensor.outgoing)
            with _record(archive, file.tell(), f"data/{tensor.key}", tensor.outgoing.nbytes) as record:
                for block in content(store, tensor.outgoing):
                    record.write(block)
    sync(path)


class _Tensor:
    """What pickles like a tensor whose numbers are the record `data/{key}`."""

    def __init__(self, key: str, outgoing: Outgoing) -> None:
        self.key = key
        self.outgoing = outgoing

    def __reduce__(self) -> tuple[Any, ...]:
        shape = self.outgoing.shape
        stride = tuple(accumulate(reversed(shape[1:]), int.__mul__, initial=1))[::-1] if shape else ()
        return _rebuild_tensor_v2, (_Storage(self), 0, shape, stride, False, OrderedDict())


class _Storage:
    """What pickles like the storage of a tensor."""

    def __init__(self, tensor: _Tensor) -> None:
        outgoing = tensor.outgoing
        self.persistent_id = ("storage", STORAGE_TYPES[outgoing.dtype], tensor.key, "cpu", outgoing.numel)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: object) -> object:
        return obj.persistent_id if isinstance(obj, _Storage) else None


def _pickled(value: object) -> bytes:
    buffer = BytesIO()
    _Pickler(buffer, protocol=PROTOCOL).dump(value)
    return buffer.getvalue()


def _record(archive: zipfile.ZipFile, position: int, name: str, size: int) -> IO[bytes]:
    """Open a new record at a byte of the file; its content, of a known size, begins at a multiple of `ALIGNMENT`."""
    info = zipfile.ZipInfo(f"{ROOT}/{name}")
    is_large = size > zipfile.ZIP64_LIMIT
    header = LOCAL_HEADER_BYTES + len(info.filename) + ZIP64_BYTES * is_large + EXTRA_HEADER_BYTES
    filling = -(position + header) % ALIGNMENT
    info.extra = FILLER + struct.pack("<H", filling) + b"Z" * filling
    return archive.open(info, "w", force_zip64=is_large)
