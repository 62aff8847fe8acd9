"""Triton's interpreter as these tests need it; importing this module prepares it for the process.

With TRITON_INTERPRET=1, which tests/conftest.py sets before anything can import Triton, kernels run on CPU tensors.
"""

from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter as triton_interpreter

_patch_lang: Callable[..., Any] = triton_interpreter._patch_lang
_patch_lang_tensor: Callable[..., Any] = triton_interpreter._patch_lang_tensor
_languages: dict[int, list[ModuleType]] = {}
"""The language modules that a module of kernels sees, by the identity of its globals."""


def _patch_once(fn: FunctionType) -> Any:
    """Skip what is done already: every call of a device function would patch the whole language again."""
    seen = _languages.setdefault(
        id(fn.__globals__), [value for value in fn.__globals__.values() if value is tl or value is tl.core]
    )
    if any(tl.core.is_builtin(language.load) for language in seen):
        return _patch_lang(fn)
    return triton_interpreter._LangPatchScope()


def _patch_with_index(tensor: Any, scope: Any) -> None:
    """Let a kernel count to one of its arguments: numpy 2.4 turns no array of one element into an int any more."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


triton_interpreter._patch_lang = _patch_once
triton_interpreter._patch_lang_tensor = _patch_with_index
