"""What may be written where; and that it is written whole or not at all."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import mini_config, mk
from conversions import convert
from tensor_list import tensor_shapes

from kimik3_cli.errors import CheckpointError, RequestError


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
        ("a", "some", r"DST is .*/some, which exists; give another name, or --overwrite to replace it"),
        ("a", "a/b.pt", r"DST is .*/a/b.pt, inside SRC; give a name in another folder"),
        ("a", "pipe", r"DST is .*/pipe, which is no regular file; give another name"),
    ],
)
def test_refused(both: Path, src: str, dst: str, message: str) -> None:
    (both / "home").mkdir()
    (both / "some").write_text("text", encoding="utf-8")
    os.mkfifo(both / "pipe")
    before = {path.name for path in both.iterdir()}
    with pytest.raises(RequestError, match=message):
        convert(both / src, both / dst)
    assert {path.name for path in both.iterdir()} == before


def test_somebodys_folder_is_not_replaced(both: Path) -> None:
    home = both / "home"
    (home / "pictures").mkdir(parents=True)
    (home / "config.json").write_text("{}", encoding="utf-8")
    before = files(both)
    with pytest.raises(RequestError, match=r"which is no directory of a model and files alone; give another name"):
        convert(both / "a.pt", home, overwrite=True)
    (home / "pictures").rmdir()
    (home / "config.json").rename(home / "letter.txt")
    with pytest.raises(RequestError, match=r"which is no directory of a model and files alone; give another name"):
        convert(both / "a.pt", home, overwrite=True)
    (home / "letter.txt").unlink()
    home.rmdir()
    assert files(both).keys() == before.keys() - {"home", "home/config.json", "home/pictures"}


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


def wait_for_bytes(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait until a shard has begun to grow in a hidden folder."""
    while not any(os.path.getsize(path) > 1_000_000 for path in folder.glob(".*/*.safetensors")):
        assert process.poll() is None, "the conversion ended before it could be interrupted"
        time.sleep(0.01)
