"""`kimik3 convert` as a command: its JSON, its page, its refusals, and what the other commands make of the result."""

import json
from pathlib import Path

import pytest
from commandline import answer, refused, run_on_terminal
from conftest import Call


def test_there_and_back(kimik3: Call, mini: Path, tmp_path: Path) -> None:
    there = answer(kimik3("convert", mini, tmp_path / "a"))
    assert (there["source"], there["destination"]) == (str(mini), str(tmp_path / "a"))
    assert (there["layout"], there["parameters"], there["dropped"]) == ("kimi_k3", 56_412, [])
    assert [file["name"] for file in there["files"]] == ["config.json", "generation_config.json", "model.safetensors"]
    back = answer(kimik3("convert", tmp_path / "a", tmp_path / "b.pt"))
    assert (back["layout"], back["parameters"]) == ("format_7", 56_412)
    assert (back["tensors"], back["bytes"], back["dtypes"][0]["dtype"]) == (there["tensors"], 56_412 * 4, "float32")


def test_the_schema_describes_what_is_printed(kimik3: Call, mini: Path, tmp_path: Path) -> None:
    schema = json.loads(kimik3("schema", "convert").out)
    result = answer(kimik3("convert", mini, tmp_path / "a"))
    assert list(result) == list(schema["properties"]) == schema["required"]


def test_a_directory_speaks_without_a_flag(kimik3: Call, speaking: Path, tmp_path: Path) -> None:
    words = ("--prompt", "To be", "--max-new-tokens", "8")
    first = answer(kimik3("generate", "--checkpoint", speaking, *words))
    answer(kimik3("convert", speaking, tmp_path / "a"))
    answer(kimik3("convert", tmp_path / "a", tmp_path / "b.pt"))
    for path in (tmp_path / "a", tmp_path / "b.pt"):
        result = answer(kimik3("generate", "--checkpoint", path, *words))
        assert result["generated_text"] == first["generated_text"]
        assert result["generated_token_ids"] == first["generated_token_ids"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--dtype", "int8"), "--dtype is 'int8'; give fp32, bf16 or fp16"),
        ((), "which exists; give another name, or --overwrite to replace it"),
    ],
)
def test_refusals_exit_2(kimik3: Call, mini: Path, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    answer(kimik3("convert", mini, tmp_path / "a"))
    assert message in refused(kimik3("convert", mini, tmp_path / "a", *words), 2)


def test_arguments_are_called_by_their_names(kimik3: Call, mini: Path) -> None:
    assert refused(kimik3("convert", mini, ""), 2) == "DST is ''; give the name of a file"
    assert "Missing argument 'DST'" in refused(kimik3("convert", mini), 2)


def test_an_absent_source_exits_3(kimik3: Call, tmp_path: Path) -> None:
    assert "none.pt does not exist" in refused(kimik3("convert", tmp_path / "none.pt", tmp_path / "a"), 3)


def test_a_page_on_a_terminal(mini: Path, tmp_path: Path) -> None:
    ran = run_on_terminal("convert", mini, tmp_path / "a", "--dtype", "bf16", columns=100)
    assert ran.code == 0
    assert "K3 directory" in ran.out
    assert "56,412 parameters (54,652 in bfloat16, 1,760 in float32)" in ran.out.replace("\n", " ")
    assert "model.safetensors" in ran.out
