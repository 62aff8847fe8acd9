"""Reads the numbers of stored tensors piece by piece, so that a second whole copy never exists."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kimik3_cli.engine.checkpoint.archive import Archive
from kimik3_cli.engine.checkpoint.stored import TensorRef


def pieces(archive: Archive, ref: TensorRef) -> Iterator[Tensor]:
    """Yield the elements in row-major order as flat tensors of the stored dtype.

    A contiguous view comes in pieces of at most 1 MiB; a strided one in one piece, for which its record is read.

    Raises:
        CheckpointError: the record cannot be read.
    """
    dtype: torch.dtype = getattr(torch, ref.dtype)
    if ref.is_contiguous:
        yield from (torch.frombuffer(block, dtype=dtype) for block in archive.blocks(ref))
    else:
        count = ref.storage.nbytes // dtype.itemsize
        record = TensorRef((count,), ref.dtype, ref.storage, 0, (1,))
        whole = torch.cat([torch.frombuffer(block, dtype=dtype) for block in archive.blocks(record)])
        yield whole.as_strided(ref.shape, ref.stride, ref.offset).reshape(-1)


def read_as(archive: Archive, ref: TensorRef, dtype: torch.dtype) -> Tensor:
    """Return the tensor converted to `dtype`, on the CPU."""
    flat = torch.empty(ref.numel, dtype=dtype)
    done = 0
    for piece in pieces(archive, ref):
        flat[done : done + len(piece)] = piece
        done += len(piece)
    return flat.view(ref.shape)


def equal_values(archive: Archive, first: TensorRef, second: TensorRef) -> bool:
    """Say whether two tensors of one shape hold the same numbers, in whatever dtype each is stored; NaN equals NaN."""
    numbers = read_as(archive, first, getattr(torch, first.dtype))
    done = 0
    for piece in pieces(archive, second):
        part = numbers.view(-1)[done : done + len(piece)]
        if not torch.allclose(part.double(), piece.double(), rtol=0, atol=0, equal_nan=True):
            return False
        done += len(piece)
    return True


def count_non_finite(archive: Archive, ref: TensorRef) -> int:
    """Count NaN and infinite values of a floating-point tensor."""
    return sum(int((~torch.isfinite(piece)).sum()) for piece in pieces(archive, ref))
