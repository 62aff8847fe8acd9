"""The classes and functions that `torch.load(weights_only=True)` of torch 2.13 accepts, as plain stand-ins.

A stand-in builds a reference or a plain container and nothing else; it raises ValueError for arguments that a
checkpoint never has. Dictionaries, Counters and OrderedDicts all become dict; bytearray becomes bytes.
"""

from collections.abc import Callable
from typing import Any

from kimik3_cli.engine.checkpoint.stored import ITEM_BYTES, Global, Instance, StorageRef, TensorRef

STORAGE_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "QInt8Storage": "qint8",
    "QInt32Storage": "qint32",
    "QUInt8Storage": "quint8",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
}
STORAGE_TYPES = {
    "torch.storage.UntypedStorage": "uint8",
    **{f"torch.{name}": dtype for name, dtype in STORAGE_DTYPES.items()},
    **{f"torch.cuda.{name}": dtype for name, dtype in STORAGE_DTYPES.items() if not name.startswith("Q")},
}
TENSOR_KINDS = ("BFloat16", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
TENSOR_MODULES = ("torch", "torch.cuda", "torch.sparse", "torch.cuda.sparse")
QUANTIZERS = (
    "per_tensor_affine",
    "per_tensor_symmetric",
    "per_channel_affine",
    "per_channel_symmetric",
    "per_channel_affine_float_qparams",
)
KEY_TYPES = (str, int, float, complex, bytes, type(None), Global, Instance, StorageRef, TensorRef)


def is_accepted(name: str) -> bool:
    """Say whether torch would accept the class or function of this full name."""
    return name in CONSTRUCTORS or name in STORAGE_TYPES or name in OTHER_NAMES


def checked_key(value: object) -> object:
    """Return a dictionary key or set member of an ordinary type; a nested tuple can take forever to hash."""
    for each in value if isinstance(value, tuple) else (value,):
        if not isinstance(each, KEY_TYPES):
            raise ValueError(f"a dictionary key or set member of type {type(each).__name__}")
    return value


def checked_count(value: object) -> int:
    """Return a size, stride or offset."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"a size, stride or offset is {type(value).__name__} {str(value)[:40]}")
    return value


def _tensor(storage: object, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: object) -> TensorRef:
    return _view(storage, offset, size, stride, None)


def _tensor_with_dtype(
    storage: object,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    _requires_grad: bool,
    _hooks: object,
    dtype: Global,
    *_: object,
) -> TensorRef:
    return _view(storage, offset, size, stride, dtype.type_name.removeprefix("torch."))


def _view(storage: object, offset: int, size: tuple[int, ...], stride: tuple[int, ...], dtype: str | None) -> TensorRef:
    if not isinstance(storage, StorageRef):
        raise ValueError("a tensor without a storage")
    kind = dtype or storage.dtype
    shape = tuple(checked_count(n) for n in size)
    steps = tuple(checked_count(n) for n in stride)
    last = checked_count(offset) + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
    if 0 not in shape and (last + 1) * ITEM_BYTES[kind] > storage.nbytes:
        raise ValueError(f"a tensor of shape {list(shape)} reaches outside its storage data/{storage.key}")
    return TensorRef(shape, kind, storage, offset, steps)


def _tensor_of_type(function: Global, kind: Global, args: tuple[Any, ...], *_: object) -> object:
    if kind.refused:
        return Instance(kind.type_name, args, refused=True)
    return CONSTRUCTORS[function.type_name](*args)


def _data(data: object = None, *_: object) -> object:
    return data


def _dictionary(items: Any = ()) -> dict[Any, Any]:
    pairs = items.items() if isinstance(items, dict) else items
    return {checked_key(key): value for key, value in pairs}


def _set(members: Any = ()) -> set[Any]:
    return {checked_key(member) for member in members}


def _size(sizes: Any = ()) -> tuple[int, ...]:
    return tuple(checked_count(n) for n in sizes)


def _encode(text: str, _encoding: str) -> bytes:
    return text.encode("latin-1")


def _bytes(content: object = b"") -> bytes:
    if not isinstance(content, bytes):
        raise ValueError("a bytearray that is not made of bytes")
    return content


def _opaque(kind: str) -> Callable[..., Instance]:
    return lambda *args: Instance(kind, args, refused=False)


CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    "_codecs.encode": _encode,
    "builtins.bytearray": _bytes,
    "builtins.complex": complex,
    "builtins.set": _set,
    "collections.Counter": _dictionary,
    "collections.OrderedDict": _dictionary,
    "torch.Size": _size,
    "torch.device": _opaque("torch.device"),
    "torch.serialization._get_layout": _opaque("torch.layout"),
    "torch.nn.parameter.Parameter": _data,
    "torch._tensor._rebuild_from_type_v2": _tensor_of_type,
    "torch._utils._rebuild_parameter": _data,
    "torch._utils._rebuild_parameter_with_state": _data,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _data,
    "torch._utils._rebuild_device_tensor_from_numpy": _opaque("device tensor"),
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_with_dtype,
    "torch._utils._rebuild_qtensor": _opaque("quantized tensor"),
    "torch._utils._rebuild_sparse_tensor": _opaque("sparse tensor"),
    "torch._utils._rebuild_nested_tensor": _opaque("nested tensor"),
    "torch._utils._rebuild_meta_tensor_no_storage": _opaque("meta tensor"),
    "torch._utils._rebuild_wrapper_subclass": _opaque("tensor subclass"),
}
OTHER_NAMES = frozenset(
    [
        "torch.Tensor",
        "torch.BoolTensor",
        "torch.cuda.BoolTensor",
        "torch.storage.TypedStorage",
        *(f"torch.{dtype}" for dtype in ITEM_BYTES),
        *(f"torch.{scheme}" for scheme in QUANTIZERS),
        *(f"{module}.{kind}Tensor" for module in TENSOR_MODULES for kind in TENSOR_KINDS),
    ]
)
