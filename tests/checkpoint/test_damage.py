"""Damage anywhere in a file: it is read, or refused in one line; nothing else ever escapes, and nothing hangs."""

import os
import random
import struct
import time
import zipfile
from pathlib import Path

import pytest
import torch
from checkpoints import mk
from cpu_time import torch_import_seconds

from kimik3_cli.engine.checkpoint import load
from kimik3_cli.engine.checkpoint.contents import Contents
from kimik3_cli.engine.checkpoint.inspection import inspect_checkpoint
from kimik3_cli.engine.checkpoint.load import load_checkpoint_model
from kimik3_cli.errors import CheckpointError

FLIPS = 150
MOST_TORCH_IMPORTS = 3


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint without checksums, so that damage reaches the pickle machine."""
    path = tmp_path_factory.mktemp("sound") / "sound.pt"
    torch.serialization.set_crc32_options(False)
    try:
        mk(
            path,
            {"num_hidden_layers": 2},
            lambda made: made.update(step=3, sparse=torch.eye(3).to_sparse(), state=({1}, b"a", torch.float32)),
            {"kda_layers": [1], "full_attn_layers": [2]},
        )
    finally:
        torch.serialization.set_crc32_options(True)
    return path


def outcome(path: Path, deep: bool) -> str:
    """Read the file in every way; anything but a result or a one-line refusal fails the test."""
    started = time.process_time()
    message = str(path)
    try:
        inspect_checkpoint(path, tensors=True, deep=deep).to_json()
        load_checkpoint_model(path)
        outcome = "read"
    except CheckpointError as error:
        message, outcome = str(error), "refused"
    assert time.process_time() - started < MOST_TORCH_IMPORTS * torch_import_seconds()
    assert message.isprintable()
    assert str(path) in message
    assert "weights_only" not in message
    return outcome


def regions(path: Path) -> dict[str, tuple[int, int]]:
    """First and last byte of the pickle, of the zip directory, and of everything."""
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        size, directory = archive.infolist()[0].file_size, archive.start_dir
    start = 30 + sum(struct.unpack("<HH", content[26:30]))
    return {"pickle": (start, start + size), "directory": (directory, len(content)), "file": (0, len(content))}


@pytest.mark.parametrize("region", ["pickle", "directory", "file"])
def test_flipped_bytes(region: str, sound: Path, tmp_path: Path) -> None:
    content, (first, last) = sound.read_bytes(), regions(sound)[region]
    path, draw = tmp_path / "damaged.pt", random.Random(region)
    outcomes = set()
    for number in range(FLIPS):
        damaged = bytearray(content)
        for _ in range(draw.choice([1, 1, 2, 6])):
            damaged[draw.randrange(first, last)] = draw.randrange(256)
        path.write_bytes(damaged)
        outcomes.add(outcome(path, deep=number % 20 == 0))
    assert outcomes == {"read", "refused"}


def test_cut_anywhere(sound: Path, tmp_path: Path) -> None:
    content, path = sound.read_bytes(), tmp_path / "cut.pt"
    for percent in range(100):
        path.write_bytes(content[: len(content) * percent // 100])
        assert outcome(path, deep=False) == "refused"


def test_pieces_missing_in_the_middle(sound: Path, tmp_path: Path) -> None:
    content, path, draw = sound.read_bytes(), tmp_path / "gap.pt", random.Random(5)
    for _ in range(50):
        start = draw.randrange(len(content))
        path.write_bytes(content[:start] + content[start + draw.randrange(1, 200) :])
        outcome(path, deep=False)


def test_replaced_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.pt"
    mk(path)
    mk(tmp_path / "newer.pt", seed=1)
    read = load.read_contents

    def replaced_after(path: Path) -> Contents:
        contents = read(path)
        os.replace(tmp_path / "newer.pt", path)
        return contents

    monkeypatch.setattr(load, "read_contents", replaced_after)
    with pytest.raises(CheckpointError, match="was replaced while it was read; load it again"):
        load_checkpoint_model(path)


def test_an_encrypted_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    mk(path)
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + 8] |= 1  # "encrypted", in the directory
    path.write_bytes(content)
    for read in (inspect_checkpoint, load_checkpoint_model):
        with pytest.raises(CheckpointError, match=r"holds an encrypted record '.*data.pkl'; save it again"):
            read(path)
