"""A command line in this process, and the checkpoints that its tests ask."""

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import mk
from commandline import Ran
from tokenizers_for_tests import ALL_BYTES, save_byte_tokenizer

from kimik3_cli.cli.app import main

Call = Callable[..., Ran]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Models this small are slower with several threads, and very slow where other work competes for the cores."""
    torch.set_num_threads(1)


@pytest.fixture
def kimik3(capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Call main(argv) with both streams captured, as bytes that must be UTF-8."""
    for name in ("KIMIK3_CHECKPOINT", "NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")

    def call(*words: str | Path, stdin: bytes = b"") -> Ran:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = main([str(word) for word in words])
        out, err = capsysbinary.readouterr()
        return Ran(code, out.decode(), err.decode())

    return call


@pytest.fixture(scope="session")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 tokens, context 512, no tokenizer anywhere."""
    path = tmp_path_factory.mktemp("mini") / "mini.pt"
    mk(path)
    return path


@pytest.fixture(scope="session")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """257 tokens, one for each byte and the end, with their tokenizer beside it."""
    folder = tmp_path_factory.mktemp("speaking")
    mk(folder / "speaking.pt", cfg={"vocab_size": ALL_BYTES})
    save_byte_tokenizer(folder, ALL_BYTES)
    return folder / "speaking.pt"


@pytest.fixture(scope="session")
def silent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All logits equal, so that greedy decoding takes the lowest id, 0."""
    path = tmp_path_factory.mktemp("silent") / "silent.pt"
    mk(path, edit=lambda made: made["model"]["lm_head.weight"].zero_())
    return path
