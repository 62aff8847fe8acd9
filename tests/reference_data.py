"""Reads the reference data in tests/conformance."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

FOLDER = Path(__file__).parent / "conformance"
CASES = ("k3_tied", "kda_only", "softplus_hard", "kimi_linear")


@cache
def case(name: str) -> dict[str, Any]:
    """The description and reference values of a whole-model case."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def prompts() -> list[tuple[str, int]]:
    """(case name, prompt index) of every reference prompt."""
    return [(name, index) for name in CASES for index in range(len(case(name)["prompts"]))]


def case_path(name: str) -> Path:
    return FOLDER / f"{name}.pt"


@cache
def operators() -> dict[str, dict[str, Any]]:
    """The description of every single operator."""
    return json.loads((FOLDER / "ops.json").read_text(encoding="utf-8"))["operators"]


@cache
def _operator_tensors() -> dict[str, Tensor]:
    return load_file(FOLDER / "ops.safetensors")


def operator(name: str) -> dict[str, Tensor]:
    """The tensors of one operator by their names."""
    prefix = name + "/"
    return {key.removeprefix(prefix): t for key, t in _operator_tensors().items() if key.startswith(prefix)}


def assert_within(actual: Tensor, reference: Tensor, tolerance: float) -> None:
    """max|difference| <= tolerance * max(1, max|reference|), as the README of the data says."""
    assert actual.shape == reference.shape
    difference = (actual.double() - reference.double()).abs().max().item()
    assert difference <= tolerance * max(1.0, reference.abs().max().item())
