"""Triton's interpreter as the tests of the fused path need it; importing this module prepares it for the process.

With TRITON_INTERPRET=1, which tests/conftest.py sets before anything can import Triton, kernels run on CPU tensors, and
their products keep of their operands what tensor cores keep.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

_patch_lang: Callable[..., Any] = interpreter._patch_lang
_patch_lang_tensor: Callable[..., Any] = interpreter._patch_lang_tensor
_languages: dict[int, list[ModuleType]] = {}
"""The language modules that a module of kernels sees, by the identity of its globals."""


def _patch_once(fn: FunctionType) -> Any:
    """Skip what is done already: every call of a device function would patch the whole language again."""
    seen = _languages.setdefault(
        id(fn.__globals__), [value for value in fn.__globals__.values() if value is tl or value is tl.core]
    )
    if any(tl.core.is_builtin(language.load) for language in seen):
        return _patch_lang(fn)
    return interpreter._LangPatchScope()


def _patch_with_index(tensor: Any, scope: Any) -> None:
    """Let a kernel count to one of its arguments: numpy 2.4 turns no array of one element into an int any more."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def tf32(x: np.ndarray) -> np.ndarray:
    """Float32 numbers without the 13 bits that a tensor core ignores."""
    return (np.ascontiguousarray(x, dtype=np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def product(a: np.ndarray, b: np.ndarray, precision: Any) -> np.ndarray:
    """The float32 matrix product in a Triton input precision."""
    if precision == ir.INPUT_PRECISION.IEEE:
        return np.matmul(a, b)
    if precision == ir.INPUT_PRECISION.TF32:
        return np.matmul(tf32(a), tf32(b))
    assert precision == ir.INPUT_PRECISION.TF32x3, "every product says its precision"
    (a_high, a_low), (b_high, b_low) = ((tf32(x), tf32(x - tf32(x))) for x in (a, b))
    return np.matmul(a_low, b_high) + np.matmul(a_high, b_low) + np.matmul(a_high, b_high)


def _create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, _max_num_imprecise_acc: Any) -> Any:
    return TensorHandle(product(a.data, b.data, input_precision) + d.data, d.dtype.scalar)


interpreter._patch_lang = _patch_once
interpreter._patch_lang_tensor = _patch_with_index
InterpreterBuilder.create_dot = _create_dot


class LaunchRecord(NamedTuple):
    """One launch of a kernel."""

    kernel: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]


@contextmanager
def recorded_launches(run: bool = True) -> Iterator[list[LaunchRecord]]:
    """Collect every launch inside the block; `run` False only collects."""
    launches: list[LaunchRecord] = []
    execute = GridExecutor.__call__

    def record(self: Any, *args: Any, **kwargs: Any) -> None:
        arguments = dict(zip(self.arg_names, args, strict=False)) | kwargs
        launches.append(LaunchRecord(self.fn.__name__, self.grid, arguments))
        if run:
            execute(self, *args, **kwargs)

    GridExecutor.__call__ = record
    try:
        yield launches
    finally:
        GridExecutor.__call__ = execute
