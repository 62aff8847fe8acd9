"""A tensor on its way into another file, piece by piece, in the dtype that was asked for."""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import torch

from kimik3_cli.engine.checkpoint.reading import pieces
from kimik3_cli.engine.checkpoint.store import Store
from kimik3_cli.engine.checkpoint.stored import ITEM_BYTES, PackedRef, StoredTensor
from kimik3_cli.errors import RequestError

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# What the released files keep in float32 beside bfloat16: decay, selection bias, convolutions, gated norm.
FLOAT32_NAMES = (".A_log", ".dt_bias", ".e_score_correction_bias", "_conv1d.weight", ".o_norm.weight")


class Outgoing(NamedTuple):
    """One tensor of the new checkpoint and where its numbers come from.

    A `shape` with more elements than the source has is filled up with zeros.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    source: StoredTensor

    @property
    def numel(self) -> int:
        """Number of elements that will be written."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that will be written."""
        return self.numel * ITEM_BYTES[self.dtype]


def new_dtype(name: str, source: StoredTensor, asked: str | None) -> str:
    """Return the dtype of a tensor in the new checkpoint.

    Args:
        name: the tensor, by the names of the model.
        source: the tensor as it is stored.
        asked: fp32, bf16, fp16, or None to keep what is stored. MXFP4 is then unpacked to bfloat16, which holds every
            such number exactly. bf16 and fp16 leave `FLOAT32_NAMES` in float32, as the released files do.
    """
    if asked is None:
        return "bfloat16" if isinstance(source, PackedRef) else source.dtype
    return "float32" if name.endswith(FLOAT32_NAMES) else DTYPES[asked]


def content(store: Store, tensor: Outgoing) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in row-major order.

    Raises:
        CheckpointError: the source cannot be read.
        RequestError: a finite number is too large for the new dtype.
    """
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    for piece in pieces(store, tensor.source):
        numbers = piece.to(dtype)
        if dtype.itemsize < piece.dtype.itemsize or dtype == torch.float16:
            _refuse_overflow(tensor, piece, numbers)
        yield _bytes(numbers)
    yield _bytes(torch.zeros(tensor.numel - tensor.source.numel, dtype=dtype))


def _bytes(numbers: torch.Tensor) -> memoryview:
    return numbers.view(torch.uint8).numpy().data


def _refuse_overflow(tensor: Outgoing, before: torch.Tensor, after: torch.Tensor) -> None:
    if after.isfinite().all():
        return
    lost = before[after.isinf() & before.isfinite()]
    if len(lost):
        raise RequestError(
            f"{tensor.name} holds {lost[0].item():g}, but {tensor.dtype} ends at {torch.finfo(after.dtype).max:g}; "
            "leave --dtype out, or give one that goes further"
        )
