"""The released K3 in full, as a stand-in of holes, is inspected from its headers within seconds."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from commandline import PROGRAM, environment
from cpu_time import torch_import_seconds
from directories import RELEASED_SHARDS, RELEASED_TENSORS, RELEASED_VISION_TENSORS, save_released_stand_in

MOST_TORCH_IMPORTS, MOST_BYTES = 12, 1.5e9
# Runs a command and reports what it cost: its own peak memory is measured, not that of this process.
MEASURE = """
import json, resource, subprocess, sys
done = subprocess.run(sys.argv[1:], capture_output=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
cost = [done.returncode, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024]
print(json.dumps([cost, done.stdout.decode(), done.stderr.decode()]))
"""


def test_inspection_of_the_released_k3(tmp_path: Path) -> None:
    """Time is the processor's, which other work on the machine does not lengthen; all of it is one thread's."""
    save_released_stand_in(tmp_path / "k3")
    command = [sys.executable, "-c", MEASURE, *PROGRAM, "inspect-checkpoint", str(tmp_path / "k3")]
    measured = subprocess.run(command, capture_output=True, check=True, env=environment())
    (code, seconds, peak), out, err = json.loads(measured.stdout)
    assert (code, err) == (0, "")
    assert seconds < MOST_TORCH_IMPORTS * torch_import_seconds()
    assert peak < MOST_BYTES
    check_report(json.loads(out))


def check_report(result: dict[str, Any]) -> None:
    counts, memory = result["parameters"], result["memory"]
    # the model card: 2.78T, 104.2B active, the input embedding not counted
    assert round(counts["total"] / 1e12, 2) == 2.78
    assert round(counts["active"] / 1e9, 1) == 104.2
    assert sum(counts["parts"].values()) == counts["total"]
    assert (len(result["shards"]), sum(shard["tensors"] for shard in result["shards"])) == (
        RELEASED_SHARDS,
        RELEASED_TENSORS,
    )
    assert result["skipped"]["tensors"] == RELEASED_VISION_TENSORS
    uses = {use["dtype"]: use for use in result["dtypes"]}
    experts = 92 * 896 * 3
    assert (uses["mxfp4"]["tensors"], uses["mxfp4"]["parameters"]) == (experts, experts * 3072 * 3584)
    assert uses["mxfp4"]["bytes"] == experts * 3072 * 3584 * 17 // 32
    assert result["bytes"] == sum(use["bytes"] for use in uses.values())
    assert 1.5e12 < result["bytes"] < 1.6e12
    # 24 full-attention layers of 512 + 64 latents; 69 states of 96 x 128 x 128 and three tails of 3 x 12288
    assert memory["cache_bytes_per_token"] == 4 * 24 * (512 + 64)
    assert memory["cache_bytes_fixed"] == 4 * 69 * (96 * 128 * 128 + 9 * 96 * 128)
    assert memory["weights_bytes"] == 4 * counts["total"]
    assert not memory["fits"]
    assert "11.1 TB in fp32 and 5.56 TB in bf16" in memory["advice"]
    assert "1.56 TB as stored take 22 GPUs of 80 GB: see docs/interop.md" in memory["advice"]
    assert result["problems"] == []
