"""What loading and inspecting cost in memory and time, measured in processes of their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import checkpoint, mini_config
from cpu_time import torch_import_seconds
from directories import config_json, released_name, save_directory
from tensor_list import tensor_shapes

MEASURE = """
import json, os, resource, sys, time
what, path = sys.argv[1:]
if what == "load":
    import torch
    from kimik3_cli.engine.checkpoint.load import load_checkpoint_model as read
else:
    from kimik3_cli.engine.checkpoint.inspection import inspect_checkpoint as read
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before, started = peak(), time.process_time()
result = read(path)
if what == "load":
    touched = sum(float(parameter.sum()) for parameter in result[0].parameters())
print(json.dumps([peak() - before, time.process_time() - started]))
"""
MB = 10**6
# 20 million parameters in 2 layers.
WIDE = {"hidden_size": 512, "vocab_size": 8192, "intermediate_size": 3072, "num_hidden_layers": 2, "num_experts": None}
LIN = {"kda_layers": [1, 2], "full_attn_layers": [], "num_heads": 8, "head_dim": 64}


def measure(what: str, path: Path) -> tuple[int, float]:
    """(growth of the peak memory in bytes, CPU seconds) of one load or inspection."""
    done = subprocess.run([sys.executable, "-c", MEASURE, what, path], capture_output=True, check=True)
    growth, seconds = json.loads(done.stdout)
    return growth, seconds


@pytest.mark.parametrize("is_directory", [False, True], ids=["file", "directory"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_second_copy_of_the_weights(dtype: torch.dtype, is_directory: bool, tmp_path: Path) -> None:
    path = tmp_path / "wide"
    config = mini_config(WIDE, LIN)
    weights = {name: torch.ones(shape, dtype=dtype) for name, shape in tensor_shapes(config).items()}
    total = 4 * sum(tensor.numel() for tensor in weights.values())
    assert total > 80 * MB
    if is_directory:
        save_directory(path, config_json(config), {released_name(name): each for name, each in weights.items()}, 2)
    else:
        torch.save({"format_version": 7, "model_config": config, "model": weights}, path)
    growth, _ = measure("load", path)
    # The contract allows 100 MB more; a stored copy beside the loaded one would be 40 MB and must show.
    assert growth <= 1.2 * total + 15 * MB


def test_four_gigabytes_of_optimizer_cost_nothing(tmp_path: Path) -> None:
    """The file is sparse: its records are holes, as large as real ones to whoever reads them."""
    made = checkpoint(mini_config())
    with torch.serialization.skip_data():
        torch.save(made, tmp_path / "mini.pt")
        moments = {name: torch.empty(500_000_000) for name in "mv"}
        torch.save({**made, "optimizer": moments}, tmp_path / "large.pt")
    assert (tmp_path / "large.pt").stat().st_size > 4000 * MB
    for what in ("load", "inspect"):
        growth, seconds = measure(what, tmp_path / "mini.pt")
        large_growth, large_seconds = measure(what, tmp_path / "large.pt")
        assert large_growth - growth < 20 * MB
        assert large_seconds - seconds < 0.3 * torch_import_seconds()
