"""--dtype: what becomes of each tensor, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import mk
from conversions import convert, tensors_of

from kimik3_cli.errors import RequestError

NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KEPT = (".A_log", ".dt_bias", ".e_score_correction_bias", "_conv1d.weight", ".o_norm.weight")


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("asked", NAMES)
def test_both_ways(asked: str, stored: torch.dtype, tmp_path: Path) -> None:
    def store(made: dict[str, Any]) -> None:
        made["model"] = {name: tensor.to(stored) for name, tensor in made["model"].items()}

    made = mk(tmp_path / "a.pt", edit=store)["model"]
    convert(tmp_path / "a.pt", tmp_path / "a", dtype=asked)
    convert(tmp_path / "a.pt", tmp_path / "as_stored")
    convert(tmp_path / "as_stored", tmp_path / "b.pt", dtype=asked)
    back = torch.load(tmp_path / "b.pt", weights_only=True)["model"]
    directory = tensors_of(tmp_path / "a")
    for name, tensor in made.items():
        wanted = tensor.to(torch.float32 if name.endswith(KEPT) else NAMES[asked])
        assert back[name].dtype == wanted.dtype, name
        assert torch.equal(back[name], wanted), name
        prefix = "language_model." if name == "lm_head.weight" else "language_model.model."
        assert directory[prefix + name].dtype == wanted.dtype, name
        assert torch.equal(directory[prefix + name].flatten()[: wanted.numel()], wanted.flatten()), name


def test_the_result_counts_by_dtype(tmp_path: Path) -> None:
    mk(tmp_path / "a.pt")
    result = convert(tmp_path / "a.pt", tmp_path / "a", dtype="bf16")
    uses = {use.dtype: use for use in result.dtypes}
    assert set(uses) == {"float32", "bfloat16"}
    assert sum(use.parameters for use in uses.values()) == result.parameters == 56_412
    assert sum(use.bytes for use in uses.values()) == result.bytes
    assert uses["bfloat16"].bytes == 2 * uses["bfloat16"].parameters


def test_the_configuration_names_the_dtype_of_most_numbers(tmp_path: Path) -> None:
    mk(tmp_path / "a.pt")
    for asked, dtype in NAMES.items():
        convert(tmp_path / "a.pt", tmp_path / asked, dtype=asked)
        text = (tmp_path / asked / "config.json").read_text(encoding="utf-8")
        assert f'"dtype": "{str(dtype).removeprefix("torch.")}"' in text


def large(name: str, value: float, dtype: torch.dtype = torch.float32) -> Any:
    def edit(made: dict[str, Any]) -> None:
        made["model"][name] = made["model"][name].to(dtype)
        made["model"][name].view(-1)[3] = value

    return edit


@pytest.mark.parametrize("direction", ["to a directory", "to a file"])
def test_what_fp16_cannot_hold_is_refused_and_nothing_is_left(direction: str, tmp_path: Path) -> None:
    mk(tmp_path / "a.pt", edit=large("layers.2.mlp_res_norm.weight", -70000.0))
    src, dst = tmp_path / "a.pt", tmp_path / "b"
    if direction == "to a file":
        convert(src, tmp_path / "a")
        src, dst = tmp_path / "a", tmp_path / "b.pt"
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(RequestError) as refused:
        convert(src, dst, dtype="fp16")
    message = str(refused.value)
    assert "layers.2.mlp_res_norm.weight holds -70000, but float16 ends at 65504" in message
    assert message.endswith("leave --dtype out, or give one that goes further")
    assert {path.name for path in tmp_path.iterdir()} == before
    convert(src, dst, dtype="bf16")


def test_what_was_infinite_before_stays_so(tmp_path: Path) -> None:
    mk(tmp_path / "a.pt", edit=large("norm.weight", float("inf")))
    convert(tmp_path / "a.pt", tmp_path / "a", dtype="fp16")
    assert torch.isinf(tensors_of(tmp_path / "a")["language_model.model.norm.weight"]).sum() == 1


def test_bfloat16_to_float16_can_overflow_too(tmp_path: Path) -> None:
    mk(tmp_path / "a.pt", edit=large("norm.weight", 1e6, torch.bfloat16))
    with pytest.raises(RequestError, match=r"norm.weight holds 999424, but float16 ends at 65504"):
        convert(tmp_path / "a.pt", tmp_path / "a", dtype="fp16")


@pytest.mark.parametrize("asked", ["fp32", "bf16"])
def test_float64_can_overflow_too(asked: str, tmp_path: Path) -> None:
    mk(tmp_path / "a.pt", edit=large("norm.weight", 1e300, torch.float64))
    with pytest.raises(RequestError, match=r"norm.weight holds 1e\+300, but (float32|bfloat16) ends at 3.[34]"):
        convert(tmp_path / "a.pt", tmp_path / "a", dtype=asked)
