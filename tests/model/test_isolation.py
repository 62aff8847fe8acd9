"""Requests do not see each other: the same question has the same answer, bit for bit."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import ids, mk
from comparison import assert_close, load
from torch import Tensor

from kimik3_cli.engine.generation import generate_tokens, next_token_logits, stream_tokens
from kimik3_cli.engine.model.decoder import KimiK3

A, B = ids(70, seed=1), ids(45, seed=2)
FRESH_PROCESS = """
import sys, torch
from kimik3_cli.engine.checkpoint.load import load_checkpoint_model
from kimik3_cli.engine.generation import generate_tokens, next_token_logits, stream_tokens
path, ids, threads = sys.argv[1], [int(x) for x in sys.argv[2].split(",")], int(sys.argv[3])
torch.set_num_threads(threads)
model = load_checkpoint_model(path, "cpu")[0]
torch.save((generate_tokens(model, ids, max_new_tokens=6, eos_id=63), next_token_logits(model, ids)), sys.argv[4])
"""


@pytest.fixture
def mini(tmp_path: Path) -> Path:
    mk(tmp_path / "mini.pt")
    return tmp_path / "mini.pt"


def answer(model: KimiK3, prompt: list[int]) -> tuple[list[int], Tensor]:
    return generate_tokens(model, prompt, max_new_tokens=6, eos_id=63), next_token_logits(model, prompt)


def assert_same(first: tuple[list[int], Tensor], second: tuple[list[int], Tensor]) -> None:
    assert first[0] == second[0]
    assert torch.equal(first[1], second[1])


def test_one_model_asked_again(mini: Path) -> None:
    model = load(mini)
    first, between, again = answer(model, A), answer(model, B), answer(model, A)
    assert_same(first, again)
    assert_same(between, answer(load(mini), B))
    assert_same(first, answer(load(mini), A))


@pytest.mark.parametrize("steps", [1, 3])
def test_an_interrupted_generation_leaves_the_model_as_it_was(steps: int, mini: Path) -> None:
    """Closed or broken off between two tokens: the next request has the answers of a fresh model."""
    model = load(mini)
    stream = stream_tokens(model, A, max_new_tokens=6, eos_id=63)
    for _ in range(steps):
        next(stream)
    stream.close()
    with pytest.raises(KeyboardInterrupt):
        stream_tokens(model, B, max_new_tokens=6, eos_id=63).throw(KeyboardInterrupt)
    assert_same(answer(model, B), answer(load(mini), B))
    assert_same(answer(model, A), answer(load(mini), A))


def test_fresh_process(mini: Path, tmp_path: Path) -> None:
    model = load(mini)
    answer(model, B)
    arguments = [str(mini), ",".join(map(str, A)), str(torch.get_num_threads()), str(tmp_path / "answer.pt")]
    subprocess.run([sys.executable, "-c", FRESH_PROCESS, *arguments], check=True)
    assert_same(answer(model, A), torch.load(tmp_path / "answer.pt", weights_only=True))


@torch.no_grad()
def test_rows_of_a_batch(mini: Path) -> None:
    model = load(mini)
    rows = torch.tensor([ids(70, seed=seed) for seed in range(3)])
    together = model(rows)
    for row, logits in zip(rows, together, strict=True):
        assert_close(logits, model(row[None])[0])
