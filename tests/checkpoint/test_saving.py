"""save_checkpoint writes what load_checkpoint_model reads; a failed save leaves the older file as it was."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from checkpoints import checkpoint, mini_config, mk

from kimik3_cli.engine.checkpoint.inspection import inspect_checkpoint
from kimik3_cli.engine.checkpoint.load import load_checkpoint_model
from kimik3_cli.engine.checkpoint.save import save_checkpoint
from kimik3_cli.engine.config import KimiK3Config
from kimik3_cli.engine.model.decoder import KimiK3
from kimik3_cli.errors import CheckpointError


def model(**cfg: Any) -> KimiK3:
    torch.manual_seed(0)
    return KimiK3(KimiK3Config.from_dict(mini_config(cfg)))


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_round_trip(tied: bool, tmp_path: Path) -> None:
    path, trained = tmp_path / "a.pt", model(tie_word_embeddings=tied, eos_token_id=[5, 0], kda_backend="fused")
    entry = {"name_or_path": "x", "revision": None}
    state = {"step": 12, "optimizer": {"m": torch.arange(3)}, "seen": 1e9, "name": "é", "list": [None, True, (1, b"x")]}
    save_checkpoint(path, trained, tokenizer=entry, **state)
    again, metadata = load_checkpoint_model(path)
    assert (metadata.step, metadata.tokenizer, metadata.training_kda_backend) == (12, entry, "fused")
    assert again.config == trained.config.with_backend("chunkwise")
    for name, parameter in trained.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter)
    written = torch.load(path, weights_only=True)
    assert written["format_version"] == 7
    assert ("lm_head.weight" in written["model"]) is not tied
    assert "embed_tokens.weight" in written["model"]
    assert not any(tensor.requires_grad for tensor in written["model"].values())
    assert torch.equal(written.pop("optimizer")["m"], torch.arange(3))
    assert {key: written[key] for key in state if key != "optimizer"} == {
        key: value for key, value in state.items() if key != "optimizer"
    }
    assert inspect_checkpoint(path, deep=True).problems == []
    assert only_file(tmp_path) == path


def test_saving_what_was_loaded(tmp_path: Path) -> None:
    """Weights that are views of a mapped file, into that same file, in half precision as well."""
    path = tmp_path / "a.pt"
    made = mk(path)
    size = path.stat().st_size
    loaded, _ = load_checkpoint_model(path)
    save_checkpoint(path, loaded)
    assert path.stat().st_size < size + 20_000
    again, _ = load_checkpoint_model(path)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in made["model"].items())
    save_checkpoint(path, again.bfloat16())
    assert [use.dtype for use in inspect_checkpoint(path).dtypes] == ["bfloat16"]


def test_views_are_written_alone(tmp_path: Path) -> None:
    trained = model()
    large = torch.zeros(64, 1000)
    trained.embed_tokens.weight = torch.nn.Parameter(large[:, :32])
    trained.norm.weight = torch.nn.Parameter(large.view(-1)[:32])
    save_checkpoint(tmp_path / "a.pt", trained)
    mk(tmp_path / "plain.pt")
    assert (tmp_path / "a.pt").stat().st_size < (tmp_path / "plain.pt").stat().st_size + 20_000


def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a.pt", model())
    (tmp_path / "other").touch()
    assert (tmp_path / "a.pt").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_link_keeps_pointing(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    os.symlink("runs/step_12.pt", tmp_path / "latest.pt")
    save_checkpoint(tmp_path / "latest.pt", model(), step=12)
    assert (tmp_path / "latest.pt").is_symlink()
    assert load_checkpoint_model(tmp_path / "runs" / "step_12.pt")[1].step == 12


class Unsavable:
    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("cannot pickle this")


BAD_STATES = [
    ({"step": numpy.float64(3)}, "numpy.float64 under 'step'"),
    ({"state": {"history": [1, numpy.arange(2)]}}, "numpy.ndarray under 'state.history.1'"),
    ({"run": Path("/a")}, "under 'run'"),
    ({"empty": b""}, "builtins.bytes under 'empty'"),
    ({"schedule": lambda step: step}, "lambda"),
    ({"lock": Unsavable()}, "cannot pickle this"),
]


@pytest.mark.parametrize(("state", "what"), BAD_STATES, ids=[what for _, what in BAD_STATES])
def test_state_that_could_not_be_read_back(state: dict[str, Any], what: str, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"older")
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(path, model(), **state)
    assert what in str(caught.value)
    assert str(path) in str(caught.value)
    assert "unfinished" not in str(caught.value)
    assert path.read_bytes() == b"older"
    assert only_file(tmp_path) == path


@pytest.mark.parametrize("key", ["format_version", "model_config"])
def test_reserved_keys(key: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"reserved key '{key}'"):
        save_checkpoint(tmp_path / "a.pt", model(), **{key: 7})
    assert list(tmp_path.iterdir()) == []


def test_wrong_tokenizer_entry(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tokenizer entry"):
        save_checkpoint(tmp_path / "a.pt", model(), tokenizer={"revision": None})
    assert list(tmp_path.iterdir()) == []


def test_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="could not be written: No such file or directory"):
        save_checkpoint(tmp_path / "missing" / "a.pt", model())


def test_target_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.pt").mkdir()
    with pytest.raises(CheckpointError, match="exists and is no regular file"):
        save_checkpoint(tmp_path / "a.pt", model())
    assert only_file(tmp_path).is_dir()


FULL_DISK = """
import resource, sys, torch
from kimik3_cli.engine.checkpoint.load import load_checkpoint_model
from kimik3_cli.engine.checkpoint.save import save_checkpoint
from kimik3_cli.errors import CheckpointError
model, _ = load_checkpoint_model(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    save_checkpoint(sys.argv[1], model, step=2)
except CheckpointError as error:
    print(error)
"""


def test_disk_that_fills_up(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk."""
    path = tmp_path / "a.pt"
    mk(path, edit=lambda made: made.update(step=1))
    done = subprocess.run([sys.executable, "-c", FULL_DISK, path], capture_output=True, text=True, check=False)
    assert done.stdout.startswith(f"{path} could not be written: "), done.stderr
    assert load_checkpoint_model(path)[1].step == 1
    assert only_file(tmp_path) == path


def test_interrupted_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "a.pt"
    torch.save(checkpoint(mini_config()), path)
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(path, model())
    assert path.read_bytes() == before
    assert only_file(tmp_path) == path
