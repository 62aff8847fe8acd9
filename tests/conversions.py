"""Conversions in tests: run one, and look at what lies in a directory without kimik3's own reader."""

import json
import struct
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from kimik3_cli.engine.convert.service import run_convert
from kimik3_cli.requests import ConvertRequest
from kimik3_cli.results import ConvertResult

# What makes the mini model of checkpoints.py a Kimi Linear.
KIMI_LINEAR: dict[str, Any] = {
    "hidden_act": "silu",
    "attn_res_block_size": None,
    "mla_use_output_gate": False,
    "routed_expert_hidden_size": None,
}
KIMI_LINEAR_LIN: dict[str, Any] = {"gate_lower_bound": None, "use_full_rank_gate": False}


def convert(src: Path, dst: Path, **values: Any) -> ConvertResult:
    """Run a conversion; `max_shard_bytes` may be among the values."""
    limits = {key: values.pop(key) for key in ("max_shard_bytes",) if key in values}
    return run_convert(ConvertRequest.build(src=src, dst=dst, **values), **limits)


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a directory, each name once."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        part = load_file(path)
        assert not set(part) & set(tensors)
        tensors |= part
    return tensors


def header_of(path: Path) -> dict[str, Any]:
    """The header of a safetensors file."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    return header
