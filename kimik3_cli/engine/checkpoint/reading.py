"""Reads the numbers of stored tensors piece by piece, so that a second whole copy never exists."""

from collections.abc import Iterator
from mmap import mmap
from pathlib import Path

import torch
from torch import Tensor

from kimik3_cli.engine.checkpoint.files import blocks, mapped, named_file, opened
from kimik3_cli.engine.checkpoint.store import Store
from kimik3_cli.engine.checkpoint.stored import (
    CODES_PER_BYTE,
    CODES_PER_SCALE,
    ITEM_BYTES,
    PackedRef,
    StoredTensor,
    TensorRef,
)
from kimik3_cli.errors import CheckpointError

ROWS_NUMBERS = 1 << 18  # that `read_into` holds beside its result; more do not stay in the processor's cache
# E2M1, the numbers of MXFP4: sign, two bits of exponent, one of mantissa. A code is its index.
CODE_VALUES = [sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
# E8M0, the scales: the exponent of two with a bias of 127; 255 is no number.
SCALE_VALUES = [2.0 ** (exponent - 127) for exponent in range(255)] + [float("nan")]


def number_dtype(ref: StoredTensor) -> torch.dtype:
    """Return the dtype of the numbers that are read: the stored one; float32, which is exact, for MXFP4."""
    dtype: torch.dtype = torch.float32 if isinstance(ref, PackedRef) else getattr(torch, ref.dtype)
    return dtype


def pieces(store: Store, ref: StoredTensor) -> Iterator[Tensor]:
    """Yield the elements in row-major order as flat tensors of `number_dtype`.

    What lies in order comes in pieces of 1 MiB of the file at most; a strided view in one piece, for which its record
    is read.

    Raises:
        CheckpointError: the record cannot be read.
    """
    if isinstance(ref, PackedRef):
        yield from _unpacked(store, ref)
    elif ref.is_contiguous:
        yield from _stored_pieces(store, ref)
    else:
        count = ref.storage.nbytes // ITEM_BYTES[ref.dtype]
        record = TensorRef((count,), ref.dtype, ref.storage, 0, (1,))
        yield torch.cat(list(_stored_pieces(store, record))).as_strided(ref.shape, ref.stride, ref.offset).reshape(-1)


def read_as(store: Store, ref: StoredTensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor converted to `dtype`, on the CPU."""
    flat = torch.empty(ref.numel, dtype=dtype)
    done = 0
    for piece in pieces(store, ref):
        flat[done : done + len(piece)] = piece
        done += len(piece)
    return flat.view(ref.shape)


def read_into(store: Store, ref: StoredTensor, out: Tensor) -> None:
    """Read a matrix into an allocated one [rows,columns] of any layout, dtype and device, some rows at a time."""
    in_order = isinstance(ref, TensorRef) and ref.is_contiguous
    count = max(1, ROWS_NUMBERS // out.shape[1]) if in_order else len(out)
    for start in range(0, len(out), count):
        stop = min(start + count, len(out))
        part = ref.rows(start, stop) if isinstance(ref, TensorRef) else ref
        out[start:stop] = read_as(store, part, out.dtype)


def equal_values(store: Store, first: StoredTensor, second: StoredTensor) -> bool:
    """Say whether two tensors of one shape hold the same numbers, in whatever dtype each is stored; NaN equals NaN."""
    others = pieces(store, second)
    other = torch.empty(0)
    for piece in pieces(store, first):
        while len(piece):
            other = other if len(other) else next(others)
            count = min(len(piece), len(other))
            if not _same_numbers(piece[:count], other[:count]):
                return False
            piece, other = piece[count:], other[count:]
    return True


def _same_numbers(first: Tensor, second: Tensor) -> bool:
    return bool(((first == second) | (first.isnan() & second.isnan())).all())


def count_non_finite(store: Store, ref: StoredTensor) -> int:
    """Count NaN and infinite values of a floating-point tensor."""
    return sum(int((~torch.isfinite(piece)).sum()) for piece in pieces(store, ref))


class MappedStore:
    """The files of a store in memory as they lie; nothing of them is read until a tensor is used."""

    def __init__(self, store: Store) -> None:
        """Remember the store; a file is mapped when the first tensor of it is asked for."""
        self._store = store
        self._files: dict[Path, mmap] = {}

    def view(self, ref: TensorRef) -> Tensor:
        """Return a contiguous tensor as a view of its file; what is written to it never reaches the file.

        One that does not lie at a multiple of its dtype's size is copied.

        Raises:
            CheckpointError: the file is damaged, cannot be mapped, or was replaced.
        """
        path, start = self._store.location(ref.storage)
        if path not in self._files:
            self._files[path] = mapped(path, self._store.files[path])
        first = start + ref.offset * ITEM_BYTES[ref.dtype]
        if first + ref.nbytes > len(self._files[path]):
            raise _cut_off(self._store, path)
        numbers = torch.frombuffer(self._files[path], dtype=number_dtype(ref), count=ref.numel, offset=first)
        return (numbers.clone() if first % ITEM_BYTES[ref.dtype] else numbers).view(ref.shape)


def _stored_pieces(store: Store, ref: TensorRef) -> Iterator[Tensor]:
    """Yield a contiguous view as flat tensors of the stored dtype."""
    path, start = store.location(ref.storage)
    first = start + ref.offset * ITEM_BYTES[ref.dtype]
    try:
        with opened(path, store.files[path]) as file:
            for block in blocks(file, first, ref.nbytes):
                yield torch.frombuffer(block, dtype=number_dtype(ref))
    except EOFError:
        raise _cut_off(store, path) from None


def _cut_off(store: Store, path: Path) -> CheckpointError:
    file = named_file(path, store.files[path].st_size)
    return CheckpointError(f"{file} ends inside a tensor: it is damaged or was cut off; copy or save it again")


def _unpacked(store: Store, ref: PackedRef) -> Iterator[Tensor]:
    """Yield the numbers of an MXFP4 matrix as float32: code times scale, the code in the low four bits first."""
    codes = torch.tensor(CODE_VALUES)
    byte = torch.arange(256)
    pairs = torch.stack([codes[byte % 16], codes[byte // 16]], dim=1)  # [256,2]
    scale_values = torch.tensor(SCALE_VALUES)
    scales = torch.cat([piece.view(torch.uint8) for piece in _stored_pieces(store, ref.scales)])
    done = 0
    for piece in _stored_pieces(store, ref.codes):  # of whole groups: a row and a piece are multiples of 16 bytes
        groups = piece.view(torch.uint8).view(-1, CODES_PER_SCALE // CODES_PER_BYTE)
        scale = scale_values.index_select(0, scales[done : done + len(groups)].int())
        numbers = pairs.index_select(0, groups.reshape(-1).int()).view(len(groups), CODES_PER_SCALE)
        yield (numbers * scale.unsqueeze(1)).view(-1)
        done += len(groups)
