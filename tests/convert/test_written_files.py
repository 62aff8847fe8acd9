"""The files themselves: shards, index, checksums, tokenizer, and files that torch itself reads."""

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import mk
from conversions import convert, header_of, tensors_of
from tokenizers_for_tests import save_byte_tokenizer

from kimik3_cli.engine.checkpoint.inspection import inspect_checkpoint

MINI_TENSORS = 129


def test_one_shard_needs_no_index(tmp_path: Path) -> None:
    mk(tmp_path / "a.pt")
    result = convert(tmp_path / "a.pt", tmp_path / "a")
    assert [file.name for file in result.files] == ["config.json", "generation_config.json", "model.safetensors"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [file.name for file in result.files]


def test_shards_stay_below_the_limit_and_the_index_finds_every_tensor(tmp_path: Path) -> None:
    mk(tmp_path / "a.pt")
    limit = 20_000
    result = convert(tmp_path / "a.pt", tmp_path / "a", max_shard_bytes=limit)
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text(encoding="utf-8"))
    shards = sorted((tmp_path / "a").glob("*.safetensors"))
    assert len(shards) > 10
    assert [path.name for path in shards] == [
        f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)
    ]
    for shard in shards:
        header = header_of(shard)
        header.pop("__metadata__")
        assert {name for name, where in index["weight_map"].items() if where == shard.name} == set(header)
        assert max(entry["data_offsets"][1] for entry in header.values()) <= limit
    assert index["metadata"] == {"total_size": result.bytes}
    assert len(index["weight_map"]) == result.tensors


def test_a_tensor_above_the_limit_has_a_shard_to_itself(tmp_path: Path) -> None:
    mk(tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "a", max_shard_bytes=1)
    headers = [header_of(path) for path in (tmp_path / "a").glob("*.safetensors")]
    assert all(len(header) == 2 for header in headers)  # the metadata and one tensor


def test_shards_hold_the_tensors_in_the_order_of_the_layers(tmp_path: Path) -> None:
    mk(tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "a", max_shard_bytes=20_000)
    layers = []
    for path in sorted((tmp_path / "a").glob("*.safetensors")):
        named = [name.split(".layers.")[1] for name in header_of(path) if ".layers." in name]
        layers.append({int(name.split(".")[0]) for name in named})
    flat = [layer for part in layers for layer in sorted(part)]
    assert flat == sorted(flat)


def test_every_number_begins_at_a_multiple_of_its_size(tmp_path: Path) -> None:
    """An odd number of 2-byte numbers before 4-byte ones would leave these askew in a mapped file."""
    mk(tmp_path / "a.pt", {"vocab_size": 17, "hidden_size": 5}, lin={"num_heads": 1, "head_dim": 3})
    convert(tmp_path / "a.pt", tmp_path / "a", dtype="bf16")
    header = header_of(tmp_path / "a" / "model.safetensors")
    header.pop("__metadata__")
    assert any(entry["dtype"] == "F32" for entry in header.values())
    sizes = {"F32": 4, "BF16": 2}
    assert all(entry["data_offsets"][0] % sizes[entry["dtype"]] == 0 for entry in header.values())


@pytest.mark.parametrize("limit", [20_000, 10**9])
def test_checksums_are_those_of_the_files(limit: int, tmp_path: Path) -> None:
    mk(tmp_path / "a.pt")
    save_byte_tokenizer(tmp_path, 64)
    result = convert(tmp_path / "a.pt", tmp_path / "a", max_shard_bytes=limit)
    back = convert(tmp_path / "a", tmp_path / "b.pt")
    assert [file.name for file in back.files] == ["b.pt"]
    for folder, files in ((tmp_path / "a", result.files), (tmp_path, back.files)):
        for file in files:
            content = (folder / file.name).read_bytes()
            assert (file.bytes, file.sha256) == (len(content), hashlib.sha256(content).hexdigest())


def test_conversion_is_reproducible(tmp_path: Path) -> None:
    mk(tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "a")
    first = convert(tmp_path / "a", tmp_path / "b.pt").files[0]
    second = convert(tmp_path / "a", tmp_path / "b.pt", overwrite=True).files[0]
    assert first == second


def test_torch_reads_the_file_mapped_or_not_and_zip_finds_no_fault(tmp_path: Path) -> None:
    made = mk(tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b.pt")
    for mmap in (True, False):
        found = torch.load(tmp_path / "b.pt", weights_only=True, mmap=mmap)["model"]
        assert all(torch.equal(found[name], tensor) for name, tensor in made["model"].items())
        assert all(tensor.is_contiguous() for tensor in found.values())
        assert not any(tensor.requires_grad for tensor in found.values())
    with zipfile.ZipFile(tmp_path / "b.pt") as archive:
        assert archive.testzip() is None
    assert all(tensor.data_ptr() % 64 == 0 for tensor in torch.load(tmp_path / "b.pt", mmap=True)["model"].values())


def test_every_record_of_the_file_has_a_checksum(tmp_path: Path) -> None:
    mk(tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b.pt")
    report = inspect_checkpoint(tmp_path / "b.pt", deep=True)
    assert report.problems == []
    assert report.records_verified == len(tensors_of(tmp_path / "a")) + 3


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_tokenizer_beside_a_checkpoint_goes_along(tmp_path: Path) -> None:
    mk(tmp_path / "a.pt")
    save_byte_tokenizer(tmp_path, 64)
    (tmp_path / "special_tokens_map.json").write_text("{}", encoding="utf-8")
    (tmp_path / "notes.txt").write_text("not of the tokenizer", encoding="utf-8")
    convert(tmp_path / "a.pt", tmp_path / "a")
    copied = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    assert names(tmp_path / "a") == copied | {"config.json", "generation_config.json", "model.safetensors"}
    for name in copied:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / name).read_bytes()


def entry(name: str) -> Any:
    return lambda made: made.update(tokenizer={"name_or_path": name, "revision": None})


def test_the_tokenizer_that_a_checkpoint_names_comes_first(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path / "named", 64)
    save_byte_tokenizer(tmp_path, 63)
    mk(tmp_path / "a.pt", edit=entry(str(tmp_path / "named")))
    assert convert(tmp_path / "a.pt", tmp_path / "a").dropped == []
    written = (tmp_path / "a" / "tokenizer.json").read_bytes()
    assert written == (tmp_path / "named" / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("name", ["someone/some-tokenizer", "/no/such/folder"])
def test_a_tokenizer_that_is_not_here_is_reported_as_left_behind(name: str, tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path, 63)
    mk(tmp_path / "a.pt", edit=entry(name))
    assert convert(tmp_path / "a.pt", tmp_path / "a").dropped == ["tokenizer"]
    assert "tokenizer.json" not in names(tmp_path / "a")


def test_a_file_names_the_directory_that_its_tokenizer_is_in(tmp_path: Path) -> None:
    mk(tmp_path / "a.pt")
    save_byte_tokenizer(tmp_path, 64)
    convert(tmp_path / "a.pt", tmp_path / "a")
    (tmp_path / "elsewhere").mkdir()
    convert(tmp_path / "a", tmp_path / "elsewhere" / "b.pt")
    content = torch.load(tmp_path / "elsewhere" / "b.pt", weights_only=True)
    assert content["tokenizer"] == {"name_or_path": str(tmp_path / "a"), "revision": None}
