"""`kimik3 logits`: the best tokens, the whole vector, files of it."""

import errno
import json
import math
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from checkpoints import ids, mk
from commandline import answer, refused
from comparison import load
from conftest import Call
from safetensors.torch import load_file

from kimik3_cli.engine import service
from kimik3_cli.engine.generation import next_token_logits

KEYS = ["checkpoint", "device", "precision", "prompt_token_ids", "vocab_size", "top"]


def expected(checkpoint: Path, prompt: list[int]) -> torch.Tensor:
    return next_token_logits(load(checkpoint), prompt)


def test_json(kimik3: Call, mini: Path) -> None:
    result = answer(kimik3("logits", "--checkpoint", mini, "--token-ids", "7,13"))
    assert list(result) == KEYS
    assert (result["checkpoint"]["path"], result["checkpoint"]["parameters"]) == (str(mini), 56_412)
    assert (result["prompt_token_ids"], result["vocab_size"]) == ([7, 13], 64)
    logits = expected(mini, [7, 13])
    best = logits.sort(descending=True)
    assert [entry["token_id"] for entry in result["top"]] == best.indices[:10].tolist()
    assert [entry["logit"] for entry in result["top"]] == best.values[:10].tolist()
    assert all(list(entry) == ["token_id", "logit", "logprob"] for entry in result["top"])


@pytest.mark.parametrize(("top", "count"), [("1", 1), ("64", 64), ("1000", 64)])
def test_top_beyond_the_vocabulary_is_all_of_it(kimik3: Call, mini: Path, top: str, count: int) -> None:
    entries = answer(kimik3("logits", "--checkpoint", mini, "--token-ids", "7", "--top", top))["top"]
    assert len(entries) == count
    total = sum(math.exp(entry["logprob"]) for entry in entries)
    assert (abs(total - 1) < 1e-9) == (count == 64)


def test_equal_logits_are_listed_by_id(kimik3: Call, silent: Path) -> None:
    entries = answer(kimik3("logits", "--checkpoint", silent, "--token-ids", "7", "--top", "5"))["top"]
    assert [entry["token_id"] for entry in entries] == [0, 1, 2, 3, 4]


def test_text_of_the_tokens(kimik3: Call, speaking: Path) -> None:
    entries = answer(kimik3("logits", "--checkpoint", speaking, "--prompt", "é", "--top", "257"))["top"]
    by_id = {entry["token_id"]: entry["text"] for entry in entries}
    assert (by_id[0], by_id[1], by_id[27]) == ("<|end|>", "a", " ")
    assert list(entries[0]) == ["token_id", "logit", "logprob", "text"]


def test_full_adds_every_logit(kimik3: Call, mini: Path) -> None:
    result = answer(kimik3("logits", "--checkpoint", mini, "--token-ids", "7,13", "--full"))
    assert list(result) == [*KEYS, "logits"]
    assert result["logits"] == expected(mini, [7, 13]).tolist()


@pytest.mark.parametrize("suffix", [".npy", ".safetensors", ".pt"])
@pytest.mark.parametrize("full", [[], ["--full"]])
def test_output_writes_the_vector_instead(
    kimik3: Call, mini: Path, tmp_path: Path, suffix: str, full: list[str]
) -> None:
    path = tmp_path / f"logits{suffix}"
    path.write_text("an older file")
    result = answer(kimik3("logits", "--checkpoint", mini, "--token-ids", "7,13", "--output", path, *full))
    assert list(result) == [*KEYS, "output"]
    assert result["output"] == str(path)
    read: dict[str, Any] = {
        ".npy": lambda: torch.from_numpy(numpy.load(path)),
        ".safetensors": lambda: load_file(path)["logits"],
        ".pt": lambda: torch.load(path, weights_only=True),
    }
    logits = read[suffix]()
    assert (logits.dtype, logits.shape) == (torch.float32, (64,))
    assert torch.equal(logits, expected(mini, [7, 13]))
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_the_filled_chunk_must_fit(kimik3: Call, tmp_path: Path) -> None:
    """One pass over the prompt fills the last chunk: 65 tokens take 128, which a context of 100 cannot hold."""
    path = tmp_path / "short.pt"
    mk(path, cfg={"max_seq_len": 100})
    assert answer(kimik3("logits", "--checkpoint", path, "--token-ids", ",".join(map(str, ids(64)))))
    message = refused(kimik3("logits", "--checkpoint", path, "--token-ids", ",".join(map(str, ids(65)))), 2)
    assert "65 tokens fill 128" in message
    assert "max_seq_len is 100" in message


@pytest.mark.parametrize("words", [["--token-ids", "64"], ["--token-ids", "7", "--pad-id", "64"]])
def test_wrong_ids_exit_2_before_weights_are_loaded(
    kimik3: Call, mini: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(service, "_load", lambda *_: pytest.fail("weights were loaded"))
    assert "0 to 63" in refused(kimik3("logits", "--checkpoint", mini, *words), 2)


def test_the_schema_describes_what_is_printed(kimik3: Call, mini: Path) -> None:
    schema = json.loads(kimik3("schema", "logits").out)
    result = answer(kimik3("logits", "--checkpoint", mini, "--token-ids", "7", "--full"))
    assert set(schema["required"]) <= set(result) <= set(schema["properties"])


@pytest.mark.parametrize("suffix", [".npy", ".safetensors", ".pt"])
def test_a_full_disk_is_told_and_leaves_the_older_file(
    kimik3: Call, mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", full)
    target = tmp_path / f"logits{suffix}"
    target.write_text("an older file")
    ran = kimik3("logits", "--checkpoint", mini, "--token-ids", "7", "--output", target)
    assert refused(ran, 1) == f"--output could not be written (No space left on device): {target}"
    assert target.read_text() == "an older file"
    assert list(tmp_path.iterdir()) == [target]
