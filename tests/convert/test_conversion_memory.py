"""What a conversion costs in memory, measured in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import mini_config
from tensor_list import tensor_shapes

TESTS = Path(__file__).parents[1]
# A process inherits its parent's peak, so the kernel is told to forget it.
MEASURE = """
import json, re, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from conversions import convert
peak = lambda: 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
src, dst, dtype = sys.argv[2:]
Path("/proc/self/clear_refs").write_text("5")
before = peak()
result = convert(Path(src), Path(dst), dtype=dtype or None)
print(json.dumps([peak() - before, result.bytes]))
"""
MB = 10**6
# 150 million parameters; the largest tensor has 400 MB.
WIDE = {
    "hidden_size": 512,
    "vocab_size": 200_000,
    "intermediate_size": 8192,
    "num_hidden_layers": 2,
    "num_experts": None,
}
LIN = {"kda_layers": [1, 2], "full_attn_layers": [], "num_heads": 8, "head_dim": 64}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide") / "wide.pt"
    config = mini_config({**WIDE, "tie_word_embeddings": True}, LIN)
    weights = {name: torch.ones(shape) for name, shape in tensor_shapes(config).items()}
    torch.save({"format_version": 7, "model_config": config, "model": weights}, path)
    return path


def growth(src: Path, dst: Path, dtype: str = "") -> int:
    """Bytes by which the peak memory grows during a conversion."""
    command = [sys.executable, "-c", MEASURE, TESTS, src, dst, dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, written = json.loads(done.stdout)
    assert written > 200 * MB
    return int(grown)


def test_memory_does_not_grow_with_the_model(wide: Path, tmp_path: Path) -> None:
    """The contract allows the largest shard and 1 GB; a few pieces of 1 MB and what imports leave are needed."""
    assert growth(wide, tmp_path / "same") < 60 * MB
    assert growth(wide, tmp_path / "half", "bf16") < 60 * MB
    assert growth(tmp_path / "half", tmp_path / "half.pt") < 60 * MB
