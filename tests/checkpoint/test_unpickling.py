"""The torch-free unpickler accepts what `torch.load(weights_only=True)` accepts, and survives hostile pickles."""

import argparse
import pathlib
import pickle
import random
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from archives import write_pickle
from checkpoints import mk
from hypothesis import given
from hypothesis import strategies as st
from strategies import REPEATABLE

from kimik3_cli.engine.checkpoint.archive import read_archive
from kimik3_cli.engine.checkpoint.stored import Global, Instance, TensorRef, children, kind_of
from kimik3_cli.engine.checkpoint.torch_globals import CONSTRUCTORS, OTHER_NAMES, STORAGE_TYPES
from kimik3_cli.engine.checkpoint.unpickling import unpickle
from kimik3_cli.errors import CheckpointError


class Tagged(torch.Tensor):
    """Stands for a class that torch does not know."""


def parameter_with_attributes() -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    parameter.group = "decay"
    return parameter


def cyclic() -> list[Any]:
    held: list[Any] = [1]
    held.append({"again": held})
    return held


ACCEPTED = {
    "none": (None, "NoneType"),
    "bool": (True, "bool"),
    "int": (3, "int"),
    "long": (-(2**70), "int"),
    "float": (0.1, "float"),
    "str": ("é\n\x1b[0m\ud800", "str"),
    "list": ([1, [2, []]], "list"),
    "tuple": ((1, (2,), (3, 4), (5, 6, 7, 8), ()), "tuple"),
    "dict": ({1: "a", "b": {}, (1, "c"): 2, None: 3}, "dict"),
    "bytes": (b"a\x00\xff", "bytes"),
    "bytearray": (bytearray(b"ab"), "bytes"),
    "empty bytearray": (bytearray(), "bytes"),
    "set": ({1, 2}, "set"),
    "complex": (complex(1, 2), "complex"),
    "OrderedDict": (OrderedDict(a=1), "dict"),
    "Counter": (Counter("aab"), "dict"),
    "Size": (torch.Size([2, 3]), "tuple"),
    "device": (torch.device("cuda", 0), "torch.device"),
    "dtype": (torch.bfloat16, "torch.bfloat16"),
    "layout": (torch.strided, "torch.layout"),
    "state dict": (torch.nn.Linear(2, 3).state_dict(), "dict"),
    "tensor": (torch.ones(2, 3), "float32 [2, 3]"),
    "scalar tensor": (torch.tensor(3), "int64 []"),
    "empty tensor": (torch.ones(0, 4), "float32 [0, 4]"),
    "expanded": (torch.ones(1).expand(5, 2), "float32 [5, 2]"),
    "parameter": (torch.nn.Parameter(torch.ones(2)), "float32 [2]"),
    "attributes": (parameter_with_attributes(), "float32 [2, 3]"),
    "float8": (torch.ones(3).to(torch.float8_e4m3fn), "float8_e4m3fn [3]"),
    "uint16": (torch.ones(3, dtype=torch.uint16), "uint16 [3]"),
    "complex64": (torch.ones(3, dtype=torch.complex64).conj(), "complex64 [3]"),
    "sparse": (torch.eye(3).to_sparse(), "sparse tensor"),
    "meta": (torch.ones(3, device="meta"), "meta tensor"),
    "storage": (torch.ones(3).untyped_storage(), "uint8 storage"),
    "generator state": (torch.get_rng_state(), "uint8 [5056]"),
    "python random state": (random.Random(0).getstate(), "tuple"),
    "cyclic list": (cyclic(), "list"),
}
REFUSED = {
    "numpy.float64": (numpy.float64(3), "float(x)"),
    "numpy.int64": (numpy.int64(3), "int(x)"),
    "numpy.bool": (numpy.bool_(True), "plain number"),
    "numpy.ndarray": (numpy.arange(3), "torch.from_numpy(x)"),
    "numpy.dtype": (numpy.dtype("f4"), "plain number"),
    "argparse.Namespace": (argparse.Namespace(a=1), "vars(x)"),
    "pathlib": (pathlib.PurePosixPath("/a/b"), "str(x)"),
    "collections.defaultdict": (defaultdict(list, {1: [2]}), "plain containers"),
    "builtins.slice": (slice(1, 2), "plain containers"),
    "builtins.frozenset": (frozenset([1]), "plain containers"),
    "builtins.print": (print, "plain containers"),
    "builtins.bytes": (b"", "plain containers"),
    "test_unpickling.Tagged": (torch.ones(2).as_subclass(Tagged), "plain containers"),
}


@pytest.mark.parametrize(("value", "kind"), ACCEPTED.values(), ids=ACCEPTED)
def test_what_torch_accepts(value: object, kind: str, tmp_path: Path) -> None:
    torch.save({"held": value}, tmp_path / "a.pt")
    torch.load(tmp_path / "a.pt", weights_only=True)
    held = read_archive(tmp_path / "a.pt").content["held"]
    assert kind_of(held) == kind
    if isinstance(value, int | float | str | bytes | complex | set | list | tuple | None) and kind != "list":
        assert held == value
        assert type(held) is (tuple if isinstance(value, torch.Size) else type(value))


@pytest.mark.parametrize(("type_name", "value", "remedy"), [(k, *v) for k, v in REFUSED.items()], ids=REFUSED)
def test_what_torch_refuses(type_name: str, value: object, remedy: str, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    mk(path, edit=lambda made: made.update(step=value, nested={"list": [1, value]}))
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)
    with pytest.raises(CheckpointError) as caught:
        read_archive(path)
    message = str(caught.value)
    assert type_name in message
    assert "under 'step'" in message
    assert "under 'nested.list.1'" in message
    assert remedy in message
    assert "weights_only" not in message


def test_names_that_torch_accepts(tmp_path: Path) -> None:
    """Our list holds nothing that the installed torch would refuse."""
    names = [name.rpartition(".") for name in (*CONSTRUCTORS, *OTHER_NAMES, *STORAGE_TYPES)]
    pickled = b"\x80\x02(" + b"".join(f"c{module}\n{name}\n".encode() for module, _, name in names) + b"t."
    write_pickle(tmp_path / "names.pt", pickled)
    assert torch.serialization.get_unsafe_globals_in_checkpoint(tmp_path / "names.pt") == []
    value, _, refused = unpickle(pickled)
    assert len(value) == len(names)
    assert refused == []


def test_nothing_named_in_a_pickle_runs(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",)

    torch.save({"step": Trap()}, tmp_path / "trap.pt")
    with pytest.raises(CheckpointError, match=r"builtins.exec under 'step'"):
        read_archive(tmp_path / "trap.pt")
    assert not (tmp_path / "ran").exists()


def test_a_refused_type_that_leaves_no_trace_in_the_data(tmp_path: Path) -> None:
    write_pickle(tmp_path / "a.pt", b"\x80\x02cos\nsystem\nq\x00}q\x01.")
    with pytest.raises(CheckpointError, match=r"holds os.system; reading such an object would run code"):
        read_archive(tmp_path / "a.pt")


def test_many_refused_objects_are_counted(tmp_path: Path) -> None:
    torch.save({"losses": [numpy.float64(n) for n in range(50)]}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"'losses.0', .* under 'losses.19' and 30 more"):
        read_archive(tmp_path / "a.pt")


def test_keys_with_control_characters_stay_on_one_line(tmp_path: Path) -> None:
    torch.save({"a\nb\x1b[31m": numpy.float64(1)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError) as caught:
        read_archive(tmp_path / "a.pt")
    assert str(caught.value).isprintable()


DICT, LIST, PROTO = b"}", b"]", b"\x80\x02"
STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"
HOSTILE = {
    "nothing": b"",
    "no stop": PROTO + DICT,
    "empty stack": PROTO + b".",
    "tuple of what is not there": PROTO + b"K\x01\x86.",
    "another persistent object": PROTO + STORAGE.replace(b"storage", b"storagE") + b".",
    "huge string": PROTO + b"X\xff\xff\xff\xff",
    "huge memo number": PROTO + DICT + b"r\xff\xff\xff\xff" + b"j\xfe\xff\xff\xff.",
    "mark that is missing": PROTO + b"t.",
    "append to a dictionary": PROTO + b"}K\x01a.",
    "key of a list": PROTO + b"]K\x01K\x02s.",
    "odd number of items": PROTO + b"}(K\x01u.",
    "list as key": PROTO + b"}]K\x01s.",
    "attributes of a number": PROTO + b"K\x01}b.",
    "call of a number": PROTO + b"K\x01)R.",
    "call without a tuple": PROTO + b"c__builtin__\nset\n]R.",
    "storage that is a number": PROTO + b"K\x01Q.",
    "storage of an unknown class": PROTO + STORAGE.replace(b"FloatStorage", b"Size\n"[:-1]) + b".",
    "negative size": PROTO + b"ctorch\nSize\n(J\xff\xff\xff\xfft\x85R.",
    "size that is true": PROTO + b"ctorch\nSize\n\x88\x85\x85R.",
    "text that is no number": PROTO + b"Ihello\n.",
    "bytearray of a huge length": PROTO + b"c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
    "tensor outside its storage": PROTO
    + b"ctorch._utils\n_rebuild_tensor_v2\n("
    + STORAGE
    + b"K\x01K\x04\x85K\x01\x85\x89Ntq\x00R.",
    "tensor without a storage": PROTO + b"ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x00K\x04\x85K\x01\x85\x89NtR.",
    "strides that do not match": PROTO + b"ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE + b"K\x00K\x04\x85)\x89NtR.",
    "storage with two sizes": PROTO + STORAGE + STORAGE.replace(b"K\x04", b"K\x05") + b"\x86.",
}


@pytest.mark.parametrize("pickled", HOSTILE.values(), ids=HOSTILE)
def test_malformed_pickles(pickled: bytes, tmp_path: Path) -> None:
    write_pickle(tmp_path / "a.pt", pickled)
    with pytest.raises(CheckpointError, match="damaged pickle"):
        read_archive(tmp_path / "a.pt")


def test_bombs_cost_nothing() -> None:
    """Tuples that double sixty times: 2^60 values to whoever hashes, prints or walks them."""
    doubled = b"K\x01" + b"".join(b"q%ch%c\x86" % (n, n) for n in range(60))
    value, _, _ = unpickle(PROTO + doubled + b".")
    assert isinstance(value, tuple)
    with pytest.raises(ValueError, match="dictionary key or set member of type tuple"):
        unpickle(PROTO + b"}" + doubled + b"K\x01s.")


def test_deep_nesting() -> None:
    value, _, _ = unpickle(PROTO + b"]" * 100_000 + b"a" * 99_999 + b".")
    depth = 1
    while value:
        (value,) = value
        depth += 1
    assert depth == 100_000


def test_endless_recursion_of_types() -> None:
    rebuild = PROTO + b"ctorch._tensor\n_rebuild_from_type_v2\nq\x00ctorch\nTensor\nq\x01"
    nested = b"h\x00h\x01" * 5000 + b")" + b"\x87" * 5000
    with pytest.raises(ValueError, match="RecursionError"):
        unpickle(rebuild + b"h\x00" + nested + b"R.")


def same(ours: object, theirs: object) -> bool:
    if isinstance(theirs, torch.Tensor):
        return isinstance(ours, TensorRef) and ours.shape == theirs.shape and ours.stride == theirs.stride()
    if isinstance(theirs, dict):
        return isinstance(ours, dict) and list(ours) == list(theirs) and all(same(ours[k], theirs[k]) for k in theirs)
    if isinstance(theirs, list | tuple):
        return type(ours) is type(theirs) and len(ours) == len(theirs) and all(map(same, ours, theirs))
    return type(ours) is type(theirs) and repr(ours) == repr(theirs)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(min_size=1)
TENSORS = st.builds(lambda rows, columns: torch.ones(rows, columns).T, st.integers(0, 3), st.integers(0, 3))
VALUES = st.recursive(
    SCALARS | TENSORS,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=12,
)


@REPEATABLE
@given(value=VALUES)
def test_any_plain_value_reads_as_torch_reads_it(value: object, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("value") / "a.pt"
    torch.save({"held": value}, path)
    theirs = torch.load(path, weights_only=True)
    assert same(read_archive(path).content, theirs)


def test_children() -> None:
    made = Instance("x", (1, "a"), refused=False)
    assert list(children({"a": 1})) == [("a", 1)]
    assert list(children([5, 6])) == [(0, 5), (1, 6)]
    assert list(children(made)) == [(0, 1), (1, "a")]
    assert list(children("text")) == list(children(Global("y", refused=True))) == []
