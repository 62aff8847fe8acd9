"""`kimik3 inspect-checkpoint` as a command: exit codes, and JSON whether or not there are problems."""

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import mk
from commandline import answer, refused
from conftest import Call
from directories import save_mini


def test_a_sound_file_exits_0(kimik3: Call, mini: Path) -> None:
    result = answer(kimik3("inspect-checkpoint", mini))
    assert (result["path"], result["problems"]) == (str(mini), [])
    assert result["parameters"]["total"] == 56_412
    assert "tensors" not in result
    assert "records_verified" not in result


def test_tensors_and_deep_add_their_lists(kimik3: Call, mini: Path) -> None:
    result = answer(kimik3("inspect-checkpoint", "--tensors", "--deep", mini))
    assert list(result["tensors"][0]) == ["name", "shape", "dtype", "bytes"]
    assert result["records_verified"] >= len(result["tensors"])


def test_problems_exit_3_and_are_printed_all_the_same(kimik3: Call, tmp_path: Path) -> None:
    def lose_two(made: dict[str, Any]) -> None:
        del made["model"]["norm.weight"], made["model"]["lm_head.weight"]

    mk(tmp_path / "broken.pt", edit=lose_two)
    ran = kimik3("inspect-checkpoint", tmp_path / "broken.pt")
    assert (ran.code, ran.err) == (3, "")
    assert {problem["name"] for problem in json.loads(ran.out)["problems"]} == {"norm.weight", "lm_head.weight"}


@pytest.mark.parametrize(
    "content", [b"", b"<!DOCTYPE html><html></html>", b"version https://git-lfs.github.com/spec/v1\n"]
)
@pytest.mark.parametrize("words", [["inspect-checkpoint"], ["generate", "--token-ids", "7", "--checkpoint"]])
def test_an_unreadable_file_exits_3_with_nothing_on_stdout(
    kimik3: Call, tmp_path: Path, content: bytes, words: list[str]
) -> None:
    path = tmp_path / "odd.pt"
    path.write_bytes(content)
    assert str(path) in refused(kimik3(*words, path), 3)


def test_the_schema_describes_what_is_printed(kimik3: Call, mini: Path, tmp_path: Path) -> None:
    schema = json.loads(kimik3("schema", "inspect").out)
    save_mini(tmp_path)
    printed = [set(answer(kimik3("inspect-checkpoint", path, "--tensors", "--deep"))) for path in (mini, tmp_path)]
    of_directories = {"shards", "skipped"}
    assert printed == [set(schema["properties"]) - of_directories, set(schema["properties"])]
    optional = set(schema["properties"]) - set(schema["required"])
    assert optional == {"tensors", "records_verified", *of_directories}
