"""What a file says of the values in it: where each tensor lies, and which types stay opaque. Nothing is read or run."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

DTYPES_BY_BYTES = {
    1: """bool uint8 int8 qint8 quint8 quint4x2 quint2x4 bits8 bits1x8 bits2x4 bits4x2 float4_e2m1fn_x2
    float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu
    int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7""",
    2: "float16 bfloat16 int16 uint16 bits16",
    4: "float32 int32 uint32 qint32 complex32",
    8: "float64 int64 uint64 complex64",
    16: "complex128",
}
ITEM_BYTES = {dtype: count for count, dtypes in DTYPES_BY_BYTES.items() for dtype in dtypes.split()}
SHOWN_LENGTH = 200
# MXFP4 of the OCP microscaling formats: codes of 4 bits, a scale for each 32 of a row.
PACKED_DTYPE, CODES_PER_BYTE, CODES_PER_SCALE = "mxfp4", 2, 32


@dataclass(frozen=True, slots=True, eq=False)
class StorageRef:
    """One record of numbers: `data/{key}` in the archive, `numel` elements of `dtype`."""

    key: str
    dtype: str
    numel: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole record."""
        return self.numel * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, eq=False)
class TensorRef:
    """A strided view of a storage; offset and stride count elements of `dtype`."""

    shape: tuple[int, ...]
    dtype: str
    storage: StorageRef
    offset: int
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements of this view."""
        return self.numel * ITEM_BYTES[self.dtype]

    def rows(self, start: int, stop: int) -> "TensorRef":
        """Return the rows from `start` to before `stop` of a tensor with at least one dimension."""
        shape, offset = (stop - start, *self.shape[1:]), self.offset + start * self.stride[0]
        return TensorRef(shape, self.dtype, self.storage, offset, self.stride)

    @property
    def view(self) -> tuple[object, ...]:
        """What two references to the same numbers have in common."""
        return self.storage.key, self.dtype, self.offset, self.shape, self.stride

    @property
    def storages(self) -> tuple[StorageRef, ...]:
        """Where the numbers lie."""
        return (self.storage,)

    @property
    def is_contiguous(self) -> bool:
        """Say whether the elements lie one after the other, in order."""
        wanted = row_major(self.shape)
        return all(size == 1 or step == way for size, step, way in zip(self.shape, self.stride, wanted, strict=True))

    @property
    def is_whole_record(self) -> bool:
        """Say whether the view is its record from first to last byte, in order."""
        return self.is_contiguous and self.nbytes == self.storage.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class PackedRef:
    """A matrix [out, in] stored as MXFP4: two numbers a byte, and a scale for each 32 numbers of a row.

    `codes` is [out, in / 2], `scales` [out, in / 32], both bytes; `reading` has what they mean.
    """

    codes: TensorRef
    scales: TensorRef

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in] of the numbers."""
        rows, code_bytes = self.codes.shape
        return rows, code_bytes * CODES_PER_BYTE

    @property
    def dtype(self) -> str:
        """The name of the format, in the place of a dtype."""
        return PACKED_DTYPE

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.codes.numel * CODES_PER_BYTE

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and the scales."""
        return self.codes.nbytes + self.scales.nbytes

    @property
    def view(self) -> tuple[object, ...]:
        """What two references to the same numbers have in common."""
        return self.codes.view, self.scales.view

    @property
    def storages(self) -> tuple[StorageRef, ...]:
        """Where the codes and the scales lie."""
        return self.codes.storage, self.scales.storage


StoredTensor = TensorRef | PackedRef


@dataclass(frozen=True, slots=True, eq=False)
class LostTensor:
    """A tensor that ought to be in a file which is missing or damaged, and which a problem of its own names."""

    file: str


@dataclass(frozen=True, slots=True, eq=False)
class Global:
    """A class or function that the file names; it is never imported. Refused when torch would refuse it."""

    type_name: str
    refused: bool


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """An object that stays opaque: its type, what it was made from, and whether torch would refuse it."""

    type_name: str
    args: tuple[Any, ...]
    refused: bool


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the stride of a tensor whose elements lie one after the other, in order."""
    stride = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= size
    return tuple(reversed(stride))


def children(value: object) -> Iterator[tuple[object, object]]:
    """Yield (key or index, value) of everything that one value holds directly."""
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple | set):
        yield from enumerate(value)
    elif isinstance(value, Instance):
        yield from enumerate(value.args)


def kind_of(value: object) -> str:
    """Name the type of a value for a reader: dtype and shape of a tensor, else the type's name."""
    if isinstance(value, StoredTensor):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, StorageRef):
        return f"{value.dtype} storage"
    return value.type_name if isinstance(value, Global | Instance) else type(value).__name__


def printable(text: str, length: int = SHOWN_LENGTH) -> str:
    """Return the text as one printable line of limited length: control characters escaped, the rest cut off."""
    cut = text if len(text) <= length else text[:length] + "..."
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in cut)


def shown_key(key: object) -> str:
    """Return a dictionary key as one printable line."""
    if isinstance(key, tuple):
        return printable(", ".join(shown_key(each) for each in key))
    return kind_of(key) if isinstance(key, TensorRef | StorageRef | Global | Instance) else printable(str(key))
