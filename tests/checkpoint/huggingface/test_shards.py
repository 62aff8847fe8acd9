"""Safetensors files and their index: read from headers alone; all damage and all disagreement is told at once."""

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from directories import INDEX, save_directory, save_mini
from safetensors.torch import load_file, save_file

from kimik3_cli.engine.checkpoint.huggingface.shards import read_shards
from kimik3_cli.engine.checkpoint.inspection import inspect_checkpoint
from kimik3_cli.engine.checkpoint.load import load_checkpoint_model
from kimik3_cli.engine.checkpoint.reading import MappedStore, read_as
from kimik3_cli.engine.checkpoint.stored import TensorRef
from kimik3_cli.errors import CheckpointError

Header = dict[str, Any]
SECOND = "model-00002-of-00003.safetensors"
THIRD = "model-00003-of-00003.safetensors"


def problems(folder: Path) -> dict[str, str]:
    """Name -> messages of every problem that inspection lists; loading must refuse with the same words."""
    found = inspect_checkpoint(folder).problems
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint_model(folder)
    assert str(caught.value).isprintable()
    assert all(problem.message in str(caught.value) for problem in found[:20])
    names = {problem.name for problem in found}
    return {name: "; ".join(problem.message for problem in found if problem.name == name) for name in names}


def edit_header(path: Path, edit: Callable[[Header], object]) -> None:
    """Change the header of a safetensors file, its numbers untouched."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def edit_index(folder: Path, edit: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    edit(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


@pytest.mark.parametrize("shards", [1, 3])
def test_every_dtype_is_read_as_it_was_written(shards: int, tmp_path: Path) -> None:
    numbers = torch.arange(24).view(2, 3, 4)
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8)
    tensors = {str(dtype): numbers.to(dtype) for dtype in (*dtypes, torch.bool, torch.float8_e4m3fn)}
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 3)}
    save_directory(tmp_path, {}, tensors, shards)
    store = read_shards(tmp_path)
    assert store.problems == []
    assert store.file_size == sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert sum(shard.tensors for shard in store.shards) == len(tensors)
    for name, tensor in tensors.items():
        ref = store.entries[name]
        assert isinstance(ref, TensorRef)
        assert torch.equal(read_as(store, ref, tensor.dtype), tensor)


def test_a_tensor_that_is_not_aligned_is_read_all_the_same(tmp_path: Path) -> None:
    """Nothing in the format aligns tensors; some writers do not."""
    wanted = torch.arange(5, dtype=torch.float32)
    header = {"byte": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    header["numbers"] = {"dtype": "F32", "shape": [5], "data_offsets": [1, 21]}
    text = json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text + b"\x07" + wanted.numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(content)
    store = read_shards(tmp_path)
    ref = store.entries["numbers"]
    assert isinstance(ref, TensorRef)
    assert torch.equal(MappedStore(store).view(ref), wanted)
    assert torch.equal(read_as(store, ref, torch.float32), wanted)


def test_a_shard_is_missing(tmp_path: Path) -> None:
    """One problem says so and how many tensors it held; the others are not drowned in their names."""
    names = save_mini(tmp_path, 3)
    (tmp_path / SECOND).unlink()
    count = len(names) // 3 + (len(names) % 3 > 1)
    assert problems(tmp_path) == {
        SECOND: f"{SECOND} is missing; download or copy it again; {INDEX} puts {count} tensors in it"
    }


def test_a_shard_is_cut_by_one_byte(tmp_path: Path) -> None:
    save_mini(tmp_path, 3)
    content = (tmp_path / THIRD).read_bytes()
    (tmp_path / THIRD).write_bytes(content[:-1])
    count = len(load_file_names(content))
    assert problems(tmp_path) == {
        THIRD: f"{THIRD} is 1 byte too short for the {count} tensors that it holds, 1 of which are cut off; "
        "download or copy it again"
    }


def load_file_names(content: bytes) -> list[str]:
    (length,) = struct.unpack("<Q", content[:8])
    return [name for name in json.loads(content[8 : 8 + length]) if name != "__metadata__"]


def test_the_index_is_missing(tmp_path: Path) -> None:
    save_mini(tmp_path, 3)
    (tmp_path / INDEX).unlink()
    assert problems(tmp_path) == {
        INDEX: f"{INDEX} is missing, and there are 3 .safetensors files; download or copy it again"
    }


def test_all_that_is_wrong_is_listed(tmp_path: Path) -> None:
    """Two shards at once, and an index that disagrees in three ways."""
    names = list(save_mini(tmp_path, 4))
    first, second = "model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors"
    in_first = [name for number, name in enumerate(names) if number % 4 == 0]

    def edit(weight_map: dict[str, str]) -> None:
        weight_map[in_first[0]] = second
        del weight_map[in_first[1]]
        weight_map["language_model.model.none"] = first

    edit_index(tmp_path, edit)
    (tmp_path / "model-00003-of-00004.safetensors").unlink()
    (tmp_path / "model-00004-of-00004.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    found = problems(tmp_path)
    assert f"is in {first}, but {INDEX} puts it in {second}" in found[in_first[0]]
    assert f"is in {first}, but {INDEX} does not name it" in found[in_first[1]]
    assert f"is not in {first}, where {INDEX} puts it" in found["language_model.model.none"]
    assert "is missing" in found["model-00003-of-00004.safetensors"]
    assert "is a Git LFS pointer; run git lfs pull" in found["model-00004-of-00004.safetensors"]
    assert len(found) == 5


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    names = list(save_mini(tmp_path, 3))
    tensors = load_file(tmp_path / SECOND)
    save_file(tensors | {names[0]: torch.zeros(64, 32)}, tmp_path / SECOND)
    found = problems(tmp_path)
    assert found == {names[0]: f"{names[0]} is in model-00001-of-00003.safetensors and in {SECOND}; remove one"}


def test_a_file_that_the_index_does_not_name(tmp_path: Path) -> None:
    """A stale one, or an adapter: with or without it the model would be another."""
    save_mini(tmp_path, 3)
    save_file({"x": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    assert list(problems(tmp_path)) == ["adapter_model.safetensors"]


def span(name: str, first: int, last: int) -> Callable[[Header], None]:
    return lambda header: header[name].update(data_offsets=[first, last])


NAME = "language_model.model.norm.weight"  # 32 float32
EDITS: dict[str, tuple[Callable[[Header], object], str]] = {
    "overlap": (span(NAME, 0, 128), "overlaps"),
    "beyond the end": (span(NAME, 10**9, 10**9 + 128), "too short"),
    "wrong size": (span(NAME, 0, 64), "no tensor that kimik3 knows"),
    "backwards": (span(NAME, 128, 0), "no tensor that kimik3 knows"),
    "negative": (span(NAME, -128, 0), "no tensor that kimik3 knows"),
    "no integers": (lambda header: header[NAME].update(data_offsets=[0.0, 128.0]), "no tensor that kimik3 knows"),
    "shape": (lambda header: header[NAME].update(shape=[-32]), "no tensor that kimik3 knows"),
    "no list": (lambda header: header[NAME].update(shape="32"), "no tensor that kimik3 knows"),
    "nested": (lambda header: header[NAME].update(shape=[[32]]), "no tensor that kimik3 knows"),
    "dtype": (lambda header: header[NAME].update(dtype="F4"), "no tensor that kimik3 knows"),
    "a number": (lambda header: header.update({NAME: 3}), "no tensor that kimik3 knows"),
    "nothing": (lambda header: header.pop(NAME), "bytes"),
}


@pytest.mark.parametrize(("edit", "what"), EDITS.values(), ids=EDITS)
def test_headers_that_lie(edit: Callable[[Header], object], what: str, tmp_path: Path) -> None:
    save_mini(tmp_path)
    edit_header(tmp_path / "model.safetensors", edit)
    assert any(what in message for message in problems(tmp_path).values())


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "no safetensors header"),
        (b"\x02\0\0", "no safetensors header"),
        (struct.pack("<Q", 2**63) + b"{}", "no safetensors header"),
        (struct.pack("<Q", 100) + b"{}", "no safetensors header"),
        (struct.pack("<Q", 2) + b"{]", "no JSON"),
        (struct.pack("<Q", 2) + b"\xff\xff", "no JSON"),
        (struct.pack("<Q", 2) + b"[]", "no object"),
        (struct.pack("<Q", 200_000) + b"[" * 200_000, "no JSON"),
        (b"<!DOCTYPE html>", "no safetensors header"),
    ],
)
def test_files_without_a_header(content: bytes, what: str, tmp_path: Path) -> None:
    save_mini(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    assert what in problems(tmp_path)["model.safetensors"]


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"weight_map": []}', b"{", b"version https://git-lfs", b"\xff"]
)
def test_an_index_that_is_none(content: bytes, tmp_path: Path) -> None:
    save_mini(tmp_path, 3)
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model.safetensors.index.json"):
        inspect_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/model.safetensors", "a/b.safetensors", "x.bin", 3, None, ""]
)
def test_an_index_that_leads_elsewhere(file: object, tmp_path: Path) -> None:
    save_mini(tmp_path, 3)
    edit_index(tmp_path, lambda weight_map: weight_map.update({NAME: file}))
    with pytest.raises(CheckpointError, match="no file of the directory"):
        inspect_checkpoint(tmp_path)


def test_directories_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(
        CheckpointError, match=r"holds no .safetensors file; give a checkpoint file, or a directory with"
    ):
        inspect_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(
        CheckpointError, match=r"it has pytorch_model.bin, which is saved again with safe_serialization"
    ):
        inspect_checkpoint(tmp_path)


def test_flipped_bytes(tmp_path: Path) -> None:
    """Anything may stand in a header: the directory is refused in one line that names it; nothing else escapes."""
    save_mini(tmp_path)
    path = tmp_path / "model.safetensors"
    content, draw = path.read_bytes(), random.Random(0)
    (length,) = struct.unpack("<Q", content[:8])
    for _ in range(100):
        damaged = bytearray(content)
        for _ in range(draw.choice([1, 1, 2, 6])):
            damaged[draw.randrange(8 + length)] ^= draw.randrange(1, 256)
        path.write_bytes(damaged)
        inspect_checkpoint(tmp_path, tensors=True).to_json()
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint_model(tmp_path)
        assert str(caught.value).isprintable()
        assert str(tmp_path) in str(caught.value)


def test_a_shard_that_is_replaced_while_it_is_read(tmp_path: Path) -> None:
    save_mini(tmp_path)
    store = read_shards(tmp_path)
    save_mini(tmp_path)
    ref = store.entries[NAME]
    assert isinstance(ref, TensorRef)
    for read in (lambda: MappedStore(store).view(ref), lambda: read_as(store, ref, torch.float32)):
        with pytest.raises(CheckpointError, match="was replaced while it was read; load it again"):
            read()
