"""Reads the pickle inside a .pt file without torch and without running anything that the file names.

The opcodes are those that `torch.load(weights_only=True)` accepts. An object of a type that torch would refuse does
not stop the reading: it becomes a refused `Instance`, so that each can be named by its type and its place.
"""

import pickletools
import warnings
from collections.abc import Callable
from typing import Any

from kimik3_cli.engine.checkpoint.stored import Global, Instance, StorageRef, TensorRef
from kimik3_cli.engine.checkpoint.torch_globals import (
    CONSTRUCTORS,
    STORAGE_TYPES,
    checked_count,
    checked_key,
    is_accepted,
)

PUSH_ARGUMENT = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING")
PUSH_NEW: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
}
NUMPY_SCALARS = {
    "b1": "bool",
    **{f"f{size}": f"float{8 * size}" for size in (2, 4, 8)},
    **{f"c{size}": f"complex{8 * size}" for size in (8, 16)},
    **{f"{code}{size}": f"{name}{8 * size}" for code, name in (("i", "int"), ("u", "uint")) for size in (1, 2, 4, 8)},
}


def unpickle(data: bytes) -> tuple[Any, dict[str, StorageRef], list[str]]:
    """Return the object in a pickle, its storages by key, and the full names in it that torch would refuse.

    Raises:
        ValueError: the bytes are not such a pickle.
    """
    machine = _Machine()
    try:
        with warnings.catch_warnings(action="ignore"):  # from decoding opcodes that are refused in the next moment
            value = machine.run(data)
    except (TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    return value, machine.storages, machine.refused


class _Machine:
    """The pickle stack machine, restricted to the opcodes of torch's safe subset."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.storages: dict[str, StorageRef] = {}
        self.refused: list[str] = []

    def run(self, data: bytes) -> Any:
        actions = self._actions()
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name in PUSH_ARGUMENT:
                self.stack.append(argument)
            elif name in PUSH_NEW:
                self.stack.append(PUSH_NEW[name]())
            elif name in actions:
                actions[name](argument)
            else:
                raise ValueError(f"pickle opcode {name} is not used by torch.save with its default protocol")
        return self.stack.pop()

    def _actions(self) -> dict[str, Callable[[Any], None]]:
        return {
            "PROTO": lambda _: None,
            "STOP": lambda _: None,
            "MARK": lambda _: self._mark(),
            "TUPLE": lambda _: self._push(tuple(self._pop_to_mark())),
            "TUPLE1": lambda _: self._push(tuple(self._pop(1))),
            "TUPLE2": lambda _: self._push(tuple(self._pop(2))),
            "TUPLE3": lambda _: self._push(tuple(self._pop(3))),
            "APPEND": lambda _: self._extend(self._pop(1)),
            "APPENDS": lambda _: self._extend(self._pop_to_mark()),
            "SETITEM": lambda _: self._update(self._pop(2)),
            "SETITEMS": lambda _: self._update(self._pop_to_mark()),
            "GLOBAL": lambda name: self._push(self._global(name)),
            "REDUCE": lambda _: self._push(_made(*self._pop(2))),
            "NEWOBJ": lambda _: self._push(_made(*self._pop(2))),
            "BUILD": lambda _: self._set_attributes(),
            "BINPERSID": lambda _: self._push(self._storage(*self.stack.pop())),
            "BINPUT": self._remember,
            "LONG_BINPUT": self._remember,
            "BINGET": lambda index: self._push(self.memo[index]),
            "LONG_BINGET": lambda index: self._push(self.memo[index]),
        }

    def _push(self, value: Any) -> None:
        self.stack.append(value)

    def _pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise ValueError("the pickle takes more values than it made")
        popped = self.stack[-count:]
        del self.stack[-count:]
        return popped

    def _mark(self) -> None:
        self.marks.append(self.stack)
        self.stack = []

    def _pop_to_mark(self) -> list[Any]:
        popped, self.stack = self.stack, self.marks.pop()
        return popped

    def _remember(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def _extend(self, items: list[Any]) -> None:
        if isinstance(self.stack[-1], list):
            self.stack[-1].extend(items)
        elif not isinstance(self.stack[-1], Instance):
            raise ValueError("the pickle appends to something that is not a list")

    def _update(self, items: list[Any]) -> None:
        if isinstance(self.stack[-1], dict):
            self.stack[-1].update(zip(map(checked_key, items[::2]), items[1::2], strict=True))
        elif not isinstance(self.stack[-1], Instance):
            raise ValueError("the pickle sets keys of something that is not a dictionary")

    def _set_attributes(self) -> None:
        # Attributes of a dictionary (a state dict's _metadata) or of an opaque object mean nothing here.
        self._pop(1)
        if not isinstance(self.stack[-1], dict | Instance | TensorRef):
            raise ValueError("the pickle sets attributes of a plain value")

    def _global(self, argument: str) -> Global:
        module, _, name = argument.partition(" ")
        # Pickle protocol 2 spells the builtins module in the Python 2 way.
        full_name = f"{'builtins' if module == '__builtin__' else module}.{name}"
        refused = not is_accepted(full_name)
        if refused:
            self.refused.append(full_name)
        return Global(full_name, refused)

    def _storage(self, kind: str, storage_type: Global, key: str, _location: object, numel: int) -> StorageRef:
        dtype = STORAGE_TYPES[storage_type.type_name]
        if kind != "storage" or not isinstance(key, str):
            raise ValueError("a persistent object that is not a storage")
        found = self.storages.setdefault(key, StorageRef(key, dtype, checked_count(numel)))
        if (found.dtype, found.numel) != (dtype, numel):
            raise ValueError(f"storage data/{key} is described in two ways")
        return found


def _made(maker: object, args: object) -> Any:
    """Return what a call in the pickle would make."""
    if not isinstance(maker, Global) or not isinstance(args, tuple):
        raise ValueError("the pickle calls something that is not a class or function")
    if maker.type_name in CONSTRUCTORS:
        return CONSTRUCTORS[maker.type_name](*args)
    return Instance(_made_type(maker.type_name, args), args, maker.refused)


def _made_type(maker: str, args: tuple[Any, ...]) -> str:
    """Name the type that a call makes; numpy and copyreg make their objects through helper functions."""
    first = args[0] if args else None
    if maker.endswith(("._reconstruct", "._reconstructor", ".__newobj__")) and isinstance(first, Global):
        return first.type_name
    if maker.endswith(".multiarray.scalar") and isinstance(first, Instance) and first.args:
        code = str(first.args[0])[:8]
        return f"numpy.{NUMPY_SCALARS.get(code, code)}"
    return maker
