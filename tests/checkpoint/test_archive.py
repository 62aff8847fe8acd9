"""Every kind of file that is no checkpoint is refused in one line: path, size, what it is, what to do."""

import gzip
import os
import pickle
import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy
import pytest
import torch
from archives import DEFLATED, edit_records, flip, read_records, write_pickle, write_records
from checkpoints import checkpoint, mini_config, mk
from safetensors.torch import save_file

from kimik3_cli.engine.checkpoint.archive import read_archive
from kimik3_cli.errors import CheckpointError


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_archive(path)
    message = str(caught.value)
    assert message.isprintable()
    assert str(path) in message
    assert "weights_only" not in message
    return message


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123456789abcdef\nsize 324312\n"


def torch_script(path: Path) -> None:
    mk(path)
    edit_records(path, {"constants.pkl": b"\x80\x02)."})


def old_torch(path: Path) -> None:
    torch.save(checkpoint(mini_config()), path, _use_new_zipfile_serialization=False)


def bare_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"format_version": 7}))


def compressed(path: Path) -> None:
    mk(path)
    write_records(path, read_records(path), DEFLATED)


def doubled(path: Path) -> None:
    mk(path)
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(archive.namelist()[0], b"another")


def big_endian(path: Path) -> None:
    mk(path)
    edit_records(path, {"byteorder": b"big"})


def other_protocol(path: Path) -> None:
    torch.save(checkpoint(mini_config()), path, pickle_protocol=4)


FILES: list[tuple[Callable[[Path], object], str, str]] = [
    (lambda path: path.write_bytes(b""), "is empty", "copy or save it again"),
    (lambda path: path.write_bytes(LFS_POINTER), "Git LFS pointer", "git lfs pull"),
    (lambda path: path.write_bytes(b"\n<!DOCTYPE html><html>Sign in"), "HTML page", "download the file itself"),
    (lambda path: path.write_bytes(b"<HTML><body>404"), "HTML page", "download the file itself"),
    (old_torch, "before torch 1.6", "save it again"),
    (bare_pickle, "bare pickle", "torch.save"),
    (lambda path: save_file({"a": torch.ones(2)}, path), "safetensors", "the directory that holds it"),
    (lambda path: path.write_bytes(b"GGUF\x03\x00\x00\x00"), "GGUF", "format version 7"),
    (lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n"), "HDF5", "format version 7"),
    (lambda path: path.write_bytes(gzip.compress(b"something")), "gzip", "decompress"),
    (lambda path: path.write_bytes(b"\x28\xb5\x2f\xfd\x04"), "zstd", "decompress"),
    (lambda path: path.write_bytes(bytes(4096)), "starts with zeros", "copy or save it again"),
    (lambda path: path.write_bytes(b'{"step": 12}'), "is not a zip archive", "check the path"),
    (lambda path: write_records(path, {}), "empty zip archive", "save the checkpoint again"),
    (lambda path: write_records(path, {"word/document.xml": b"<w/>"}), "'word/document.xml'", "no torch.save file"),
    (lambda path: numpy.savez(path.open("wb"), a=numpy.ones(2)), "'a.npy'", "no torch.save file"),
    (torch_script, "TorchScript", "save the checkpoint dictionary"),
    (compressed, "compressed record", "save it again"),
    (doubled, "two records named", "save it again"),
    (big_endian, "b'big'", "little-endian"),
    (other_protocol, "pickle opcode", "default protocol"),
]


@pytest.mark.parametrize(("write", "what", "remedy"), FILES, ids=[what for _, what, _ in FILES])
def test_other_files(write: Callable[[Path], object], what: str, remedy: str, tmp_path: Path) -> None:
    path = tmp_path / "given.pt"
    write(path)
    message = refusal(path)
    assert what in message
    assert remedy in message
    assert f"({path.stat().st_size} bytes)" in message


def test_no_such_path(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "missing.pt")


def test_a_file_taken_for_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "not a directory" in refusal(tmp_path / "file" / "mini.pt")


def test_directory(tmp_path: Path) -> None:
    assert "is a directory; give the path of a file" in refusal(tmp_path)


def test_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "is not a regular file" in refusal(tmp_path / "pipe")


def test_impossible_paths() -> None:
    for name in ("a\0b", "x" * 5000):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_archive(name)


@contextmanager
def unprivileged() -> Iterator[None]:
    """Root may read everything, so give the privilege up for a moment."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.mark.parametrize("hidden", ["file", "folder"])
def test_no_permission(hidden: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mk(folder / "mini.pt")
        folder.chmod(0o755 if hidden == "file" else 0o000)
        (folder / "mini.pt").chmod(0o000)
        with unprivileged():
            message = refusal(folder / "mini.pt")
        folder.chmod(0o755)
    assert "permission denied; make it readable" in message


def test_path_with_control_characters(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_archive(tmp_path / "two\nlines\x1b[31m.pt")
    assert str(caught.value).isprintable()
    assert "two\\nlines\\x1b[31m.pt" in str(caught.value)


@pytest.mark.parametrize("percent", range(1, 100))
def test_cut_off(percent: int, tmp_path: Path) -> None:
    path = tmp_path / "mini.pt"
    mk(path)
    whole = path.stat().st_size
    os.truncate(path, whole * percent // 100)
    message = refusal(path)
    assert f"({whole * percent // 100} bytes)" in message
    assert "incomplete zip archive" in message
    assert "cut off" in message


def test_wrong_checksum_of_the_pickle(tmp_path: Path) -> None:
    path = tmp_path / "mini.pt"
    mk(path)
    flip(path, path.read_bytes().index(b"hidden_size"), ord("H"))
    assert "wrong checksum in 'mini/data.pkl'" in refusal(path)


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        mk(tmp_path / "mini.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    archive = read_archive(tmp_path / "mini.pt")
    assert archive.content["format_version"] == 7
    assert archive.checked_records == []


def test_missing_and_short_records_are_all_named(tmp_path: Path) -> None:
    path = tmp_path / "mini.pt"
    mk(path)
    edit_records(path, {"data/0": b"1234", "data/3": None, "data/5": None})
    message = refusal(path)
    assert "data/0 has 4 of 8192 bytes, data/3 is missing, data/5 is missing" in message


def test_many_missing_records_are_counted(tmp_path: Path) -> None:
    mk(tmp_path / "mini.pt")
    edit_records(tmp_path / "mini.pt", {f"data/{number}": None for number in range(100)})
    assert "data/19 is missing and 80 more" in refusal(tmp_path / "mini.pt")


def test_record_that_starts_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "mini.pt"
    write_pickle(path, b"\x80\x02}.")
    content = path.read_bytes()
    directory = content.index(b"PK\x01\x02")
    path.write_bytes(content[: directory + 42] + struct.pack("<I", 7) + content[directory + 46 :])
    assert "incomplete zip archive (no record at byte 7)" in refusal(path)


def test_tensors_are_located(tmp_path: Path) -> None:
    path = tmp_path / "mini.pt"
    base = torch.arange(24.0).view(4, 6)
    torch.save({"whole": base, "part": base[1:3, 2:4], "turned": base.T}, path)
    content = read_archive(path).content
    assert content["whole"].is_whole_record
    assert (content["part"].offset, content["part"].shape, content["part"].stride) == (8, (2, 2), (6, 1))
    assert (content["part"].nbytes, content["part"].dtype) == (16, "float32")
    assert content["turned"].shape == (6, 4)
    assert not content["turned"].is_contiguous
    assert content["whole"].storage is content["turned"].storage
