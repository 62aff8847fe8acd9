"""What may be written where; and that it is written whole or not at all."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import mini_config, mk
from conversions import convert
from tensor_list import tensor_shapes

from kimik3_cli.engine.convert.service import run_convert
from kimik3_cli.errors import CheckpointError, RequestError
from kimik3_cli.requests import ConvertRequest


def files(folder: Path) -> dict[str, bytes | None]:
    """Relative path -> content of everything below a folder; None for folders."""
    found = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in found}


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """A folder with a.pt and its directory a."""
    mk(tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "a")
    return tmp_path


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        ("a.pt", "none/b", r"DST is .*/none/b; the folder .*/none does not exist"),
        (
            "a.pt",
            "b.pt",
            r"SRC is the file .*/a.pt, so DST is a directory; .*/b.pt is the name of a file: give one without .pt",
        ),
        ("a.pt", "some", r"SRC is the file .*/a.pt, so DST is a directory; .*/some is a file: name a directory"),
        ("a.pt", "a", r"DST is .*/a, which exists; give another name, or --overwrite to replace it"),
        ("a", "a", r"SRC is the directory .*/a, so DST is a file; .*/a is a directory: name a file"),
        ("a", "home", r"SRC is the directory .*/a, so DST is a file; .*/home is a directory: name a file"),
        ("a", "some", r"DST is .*/some, which exists and is no checkpoint to replace; give another name"),
        ("a", "a.pt", r"DST is .*/a.pt, which exists; give another name, or --overwrite to replace it"),
        ("a", "b.safetensors", r"so DST is a file of torch.save; .*/b.safetensors is the name of a safetensors file"),
        ("a", "a/deep/b.pt", r"DST is .*/a/deep/b.pt, inside SRC; give a name in another folder"),
        ("a", "dangling", r"DST is .*/dangling, a link to nothing; remove it, or give another name"),
        ("none.pt", "dangling", r"DST is .*/dangling, a link to nothing; remove it, or give another name"),
        ("a", "a/b.pt", r"DST is .*/a/b.pt, inside SRC; give a name in another folder"),
        ("a", "pipe", r"DST is .*/pipe, which is no regular file; give another name"),
    ],
)
def test_refused(both: Path, src: str, dst: str, message: str) -> None:
    (both / "home").mkdir()
    (both / "some").write_text("text", encoding="utf-8")
    os.mkfifo(both / "pipe")
    (both / "dangling").symlink_to(both / "nothing")
    if "deep" in dst:
        (both / "a" / "deep").mkdir()
    before = {path.name for path in both.iterdir()}
    with pytest.raises(RequestError, match=message):
        convert(both / src, both / dst)
    assert {path.name for path in both.iterdir()} == before


def test_a_trailing_slash_is_no_file(both: Path) -> None:
    with pytest.raises(RequestError, match=r"DST is '.*/b.pt/', a directory by its slash, but SRC is a directory"):
        run_convert(ConvertRequest.build(src=both / "a", dst=f"{both}/b.pt/"))
    run_convert(ConvertRequest.build(src=both / "a.pt", dst=f"{both}/b/"))
    assert (both / "b" / "config.json").is_file()


@pytest.mark.parametrize(
    ("strange", "named"),
    [
        (["README.md"], "README.md"),
        (["LICENSE", "letter.txt"], "LICENSE, letter.txt"),
        (["adapter_model.safetensors"], "adapter_model.safetensors"),
        (["tokenizer_notes.txt"], "tokenizer_notes.txt"),
        (["b1", "b2", "b3", "b4", "b5"], "b1, b2, b3 and 2 more"),
    ],
)
def test_a_directory_with_other_files_is_not_replaced(strange: list[str], named: str, both: Path) -> None:
    for name in strange:
        (both / "a" / name).write_text("mine", encoding="utf-8")
    before = files(both)
    with pytest.raises(RequestError, match=rf"DST is .*/a, which holds {named}, not of a model that kimik3 writes"):
        convert(both / "a.pt", both / "a", overwrite=True)
    assert files(both) == before


@pytest.mark.parametrize("config", ["{}", '{"model_type": "llama"}', "[1]", "{", None])
def test_the_directory_of_another_model_is_not_replaced(config: str | None, both: Path) -> None:
    path = both / "a" / "config.json"
    path.unlink() if config is None else path.write_text(config, encoding="utf-8")
    before = files(both)
    with pytest.raises(RequestError, match=r"has no config.json of a kimi_k3 or kimi_linear model; give another name"):
        convert(both / "a.pt", both / "a", overwrite=True)
    assert files(both) == before


def test_a_folder_in_a_directory_is_not_replaced(both: Path) -> None:
    (both / "a" / "tokenizer.json").mkdir()
    with pytest.raises(RequestError, match=r"which holds tokenizer.json, not of a model"):
        convert(both / "a.pt", both / "a", overwrite=True)


@pytest.mark.parametrize("content", [b"a letter", b"PK\x03\x04"])
def test_a_file_that_is_no_checkpoint_is_not_replaced(content: bytes, both: Path) -> None:
    (both / "a.pt").write_bytes(content)
    with pytest.raises(RequestError, match=r"DST is .*/a.pt, which exists and is no checkpoint to replace"):
        convert(both / "a", both / "a.pt", overwrite=True)
    assert (both / "a.pt").read_bytes() == content
    torch.save({"w": torch.zeros(2)}, both / "a.pt")
    with pytest.raises(RequestError, match=r"no checkpoint to replace"):
        convert(both / "a", both / "a.pt", overwrite=True)


def test_what_may_be_replaced(both: Path) -> None:
    """An empty file, and a directory with all that a model and its tokenizer usually have."""
    (both / "a.pt").write_bytes(b"")
    convert(both / "a", both / "a.pt", overwrite=True)
    for name in ("tokenizer.json", "vocab.txt", "tokenization_kimi.py", "model-00001-of-00002.safetensors"):
        (both / "a" / name).write_text("old", encoding="utf-8")
    convert(both / "a.pt", both / "a", overwrite=True)
    assert set(files(both / "a")) == {"config.json", "generation_config.json", "model.safetensors"}


def test_the_folder_of_the_source_is_not_replaced(tmp_path: Path) -> None:
    mk(tmp_path / "a.pt")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    for dst in (tmp_path, tmp_path.parent):
        with pytest.raises(RequestError, match=r", the folder that SRC lies in; give another name"):
            convert(tmp_path / "a.pt", dst, overwrite=True)
    assert set(files(tmp_path)) == {"a.pt", "config.json"}


def test_overwriting(both: Path) -> None:
    mk(both / "other.pt", {"vocab_size": 70}, edit=lambda made: made.update(step=1))
    (both / "empty").mkdir()
    convert(both / "other.pt", both / "empty", overwrite=True)
    convert(both / "other.pt", both / "a", overwrite=True)
    assert files(both / "a") == files(both / "empty")
    convert(both / "a", both / "a.pt", overwrite=True)
    assert torch.load(both / "a.pt", weights_only=True)["model_config"]["vocab_size"] == 70
    assert {path.name for path in both.iterdir()} == {"a", "a.pt", "empty", "other.pt"}


def test_a_link_leads_to_what_is_replaced(both: Path) -> None:
    (both / "link").symlink_to(both / "a", target_is_directory=True)
    before = (both / "a").stat().st_ino
    convert(both / "a.pt", both / "link", overwrite=True)
    assert (both / "link").is_symlink()
    assert (both / "a").stat().st_ino != before


def test_a_damaged_source_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    mk(tmp_path / "a.pt", edit=lambda made: made["model"].pop("norm.weight"))
    with pytest.raises(CheckpointError, match=r"a.pt .* does not fit its configuration: norm.weight \[32\] is missing"):
        convert(tmp_path / "a.pt", tmp_path / "a")
    mk(tmp_path / "b.pt", {"tie_word_embeddings": True}, edit=untie)
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from embed_tokens.weight"):
        convert(tmp_path / "b.pt", tmp_path / "b")
    with pytest.raises(CheckpointError, match=r"none.pt does not exist"):
        convert(tmp_path / "none.pt", tmp_path / "c")
    assert set(files(tmp_path)) == {"a.pt", "b.pt"}


def untie(made: dict[str, Any]) -> None:
    made["model"]["lm_head.weight"] = made["model"]["embed_tokens.weight"] + 1


def test_a_directory_that_lost_a_shard_is_refused(tmp_path: Path) -> None:
    mk(tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "a", max_shard_bytes=50_000)
    lost = sorted((tmp_path / "a").glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(CheckpointError, match=lost.name):
        convert(tmp_path / "a", tmp_path / "b.pt")
    assert not (tmp_path / "b.pt").exists()


FULL_DISK = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from conversions import convert
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    convert(Path(sys.argv[2]), Path(sys.argv[3]), overwrite=True)
except OSError as error:
    print(error.filename, error.strerror)
"""
TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(("src", "dst"), [("a.pt", "new"), ("a.pt", "a"), ("a", "new.pt"), ("a", "a.pt")])
def test_disk_that_fills_up(both: Path, src: str, dst: str) -> None:
    """A limit on the size of files stands for the full disk."""
    before = files(both)
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, TESTS, both / src, both / dst], capture_output=True, text=True, check=False
    )
    assert done.stdout == f"{both / dst} DST could not be written (File too large)\n", done.stderr
    assert files(both) == before


@pytest.mark.parametrize(("src", "dst"), [("a.pt", "new"), ("a.pt", "a"), ("a", "new.pt"), ("a", "a.pt")])
@pytest.mark.parametrize("step", ["fsync", "replace", "rename"])
def test_interrupt_at_any_step(both: Path, src: str, dst: str, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of the step in turn is interrupted; after each the folder is as before, or the work is done."""
    before = files(both)
    real = getattr(os, step)
    for number in range(100):
        calls = iter(range(100))

        def interrupted(*args: Any, calls: Any = calls, number: int = number) -> None:
            if next(calls) == number:
                raise KeyboardInterrupt
            real(*args)

        monkeypatch.setattr(os, step, interrupted)
        try:
            convert(both / src, both / dst, overwrite=True)
            break
        except KeyboardInterrupt:
            assert {name for name in files(both) if name.startswith(".")} == set()
            if files(both) != before:
                assert number == next(calls) - 1  # the last step makes durable what is already in its place
                break
    assert {path.name for path in both.iterdir()} <= {"a", "a.pt", dst}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 400 MB, so that there is time to interrupt its conversion."""
    path = tmp_path_factory.mktemp("wide") / "wide.pt"
    config = mini_config({"vocab_size": 1_600_000, "tie_word_embeddings": False})
    weights = {name: torch.zeros(shape) for name, shape in tensor_shapes(config).items()}
    torch.save({"format_version": 7, "model_config": config, "model": weights}, path)
    return path


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_of_a_process(number: signal.Signals, wide: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "kimik3_cli", "convert", wide, tmp_path / "new"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    wait_for_bytes(process, tmp_path)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"")
    assert files(tmp_path) == {}


def test_kill(wide: Path, tmp_path: Path) -> None:
    """Nothing can tidy up after SIGKILL: what is there is hidden, under another name, and in nobody's way."""
    process = subprocess.Popen([sys.executable, "-m", "kimik3_cli", "convert", wide, tmp_path / "new"])
    wait_for_bytes(process, tmp_path)
    process.kill()
    process.wait()
    assert not (tmp_path / "new").exists()
    assert [path.name for path in tmp_path.iterdir()] == [f".new.{process.pid}.unfinished"]


@pytest.mark.parametrize(("src", "dst"), [("a.pt", "new"), ("a", "new.pt")])
def test_no_room(src: str, dst: str, both: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(both)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=99))
    with pytest.raises(OSError, match=r"DST needs \d{6} bytes, and its file system has 99 free; make room"):
        convert(both / src, both / dst)
    assert files(both) == before


def wait_for_bytes(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait until a shard has begun to grow in a hidden folder."""
    while not any(os.path.getsize(path) > 1_000_000 for path in folder.glob(".*/*.safetensors")):
        assert process.poll() is None, "the conversion ended before it could be interrupted"
        time.sleep(0.01)
