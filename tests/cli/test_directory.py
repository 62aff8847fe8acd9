"""Hugging Face directories on the command line: no flag but --checkpoint, and one line for everything that is wrong."""

import json
from pathlib import Path

import pytest
from checkpoints import mini_config, mk
from commandline import answer, refused
from conftest import Call
from directories import INDEX, config_json, mini_weights, save_directory, save_mini
from tokenizers_for_tests import ALL_BYTES, save_byte_tokenizer

SECOND, THIRD = (f"model-0000{number}-of-00003.safetensors" for number in (2, 3))
GENERATE = ("generate", "--max-new-tokens", "6", "--checkpoint")


@pytest.fixture(scope="module")
def speaking_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """257 tokens and their tokenizer in the directory."""
    folder = tmp_path_factory.mktemp("speaking_folder")
    cfg = {"vocab_size": ALL_BYTES}
    save_directory(folder, config_json(mini_config(cfg)), mini_weights(cfg), 2)
    save_byte_tokenizer(folder, ALL_BYTES)
    return folder


def padded_folder(folder: Path, tokens: int) -> Path:
    """A model of 64 ids, all of one logit, and a tokenizer of fewer or more."""
    weights = mini_weights()
    weights["language_model.lm_head.weight"].zero_()
    save_directory(folder, config_json(mini_config()), weights)
    save_byte_tokenizer(folder, tokens)
    return folder


def test_a_directory_with_its_tokenizer_needs_no_other_flag(
    kimik3: Call, speaking_folder: Path, speaking: Path
) -> None:
    result = answer(kimik3("generate", "--checkpoint", speaking_folder, "--prompt", "abc"))
    wanted = answer(kimik3("generate", "--checkpoint", speaking, "--prompt", "abc"))
    assert result["generated_token_ids"] == wanted["generated_token_ids"]
    assert result["generated_text"] == wanted["generated_text"]
    assert result["checkpoint"] == {
        "path": str(speaking_folder),
        "format_version": None,
        "step": None,
        "training_kda_backend": None,
        "inference_kda_backend": "chunkwise",
        "parameters": wanted["checkpoint"]["parameters"],
        "vocab_size": ALL_BYTES,
        "max_seq_len": 512,
    }


def test_logits_of_a_directory(kimik3: Call, speaking_folder: Path, speaking: Path) -> None:
    result, wanted = (
        answer(kimik3("logits", "--checkpoint", p, "--prompt", "ab")) for p in (speaking_folder, speaking)
    )
    for one, other in zip(result["top"], wanted["top"], strict=True):
        assert (one["token_id"], one["text"]) == (other["token_id"], other["text"])
        assert one["logit"] == pytest.approx(other["logit"], rel=1e-5)


def lose_a_shard(folder: Path) -> None:
    (folder / SECOND).unlink()


def cut_a_shard(folder: Path) -> None:
    content = (folder / THIRD).read_bytes()
    (folder / THIRD).write_bytes(content[:-1])


def lose_the_index(folder: Path) -> None:
    (folder / INDEX).unlink()


@pytest.mark.parametrize(
    ("damage", "file", "what"),
    [
        (lose_a_shard, SECOND, f"is missing; download or copy it again; {INDEX} puts 69 tensors in it"),
        (cut_a_shard, THIRD, "is 1 byte too short for the 68 tensors that it holds, 1 of which are cut off"),
        (lose_the_index, INDEX, "is missing, and there are 3 .safetensors files"),
    ],
)
def test_damaged_directories(kimik3: Call, tmp_path: Path, damage: object, file: str, what: str) -> None:
    """Refused with the file and its tensors, never half a model; inspection lists it."""
    assert callable(damage)
    save_mini(tmp_path, 3)
    damage(tmp_path)
    for command in (GENERATE, ("logits", "--checkpoint")):
        message = refused(kimik3(*command, tmp_path, "--token-ids", "7"), 3)
        assert f"{file} {what}" in message
        assert str(tmp_path) in message
    ran = kimik3("inspect-checkpoint", tmp_path)
    (problem,) = json.loads(ran.out)["problems"]
    assert (ran.code, problem["kind"], problem["name"]) == (3, "shard", file)
    assert what in problem["message"]


def test_a_folder_that_is_no_checkpoint(kimik3: Call, tmp_path: Path) -> None:
    for words in (("inspect-checkpoint", tmp_path), (*GENERATE, tmp_path, "--token-ids", "7")):
        message = refused(kimik3(*words), 3)
        assert (
            message
            == f"{tmp_path} is a directory without config.json; give a checkpoint file, or a Hugging Face directory"
        )


def test_a_directory_without_a_tokenizer(kimik3: Call, tmp_path: Path) -> None:
    save_mini(tmp_path)
    message = refused(kimik3(*GENERATE, tmp_path, "--prompt", "a"), 3)
    assert message.startswith(f"'{tmp_path}' names no tokenizer and there is no tokenizer.json in it; give --tokenizer")


@pytest.mark.parametrize("mode", [[], ["--mode", "sample", "--temperature", "1e30", "--top-k", "64", "--seed", "3"]])
@pytest.mark.parametrize("cached", [[], ["--no-cache"]])
def test_ids_that_the_tokenizer_lacks_are_never_produced(
    kimik3: Call, tmp_path: Path, mode: list[str], cached: list[str]
) -> None:
    """All logits are equal, so sampling would draw every id of 64; only 9 are the tokenizer's."""
    folder = padded_folder(tmp_path, 9)
    words = ("generate", "--checkpoint", folder, "--prompt", "abc", "--max-new-tokens", "60", "--eos-id", "63", *cached)
    message = refused(kimik3(*words, *mode), 3)
    assert "has 9 tokens, but the checkpoint's vocab_size is 64" in message
    assert "--allow-vocab-padding" in message
    new = answer(kimik3(*words, *mode, "--allow-vocab-padding"))["generated_token_ids"]
    assert set(new) == (set(range(9)) if mode else {0})


def test_top_lists_only_ids_of_the_tokenizer(kimik3: Call, tmp_path: Path) -> None:
    folder = padded_folder(tmp_path, 9)
    words = ("logits", "--checkpoint", folder, "--prompt", "abc", "--top", "64", "--full", "--allow-vocab-padding")
    result = answer(kimik3(*words))
    assert [each["token_id"] for each in result["top"]] == list(range(9))
    assert all(abs(each["logprob"] + 2.1972245773362196) < 1e-9 for each in result["top"]), "ln 9"
    assert len(result["logits"]) == 64


def test_a_longer_tokenizer_stays_an_error(kimik3: Call, tmp_path: Path) -> None:
    folder = padded_folder(tmp_path, 65)
    message = refused(kimik3(*GENERATE, folder, "--prompt", "abc", "--allow-vocab-padding"), 3)
    assert "has 65 tokens, but the checkpoint's vocab_size is 64" in message
    assert "--allow-vocab-padding" not in message


@pytest.mark.parametrize("command", ["generate", "logits"])
def test_a_shorter_context(kimik3: Call, tmp_path: Path, mini: Path, command: str) -> None:
    save_mini(tmp_path)
    for path in (tmp_path, mini):
        words = (command, "--checkpoint", path, "--token-ids", "7,13")
        assert answer(kimik3(*words, "--max-seq-len", "100"))["checkpoint"]["max_seq_len"] == 100
        assert "--max-seq-len is 513; the checkpoint allows 1 to 512" in refused(
            kimik3(*words, "--max-seq-len", "513"), 2
        )
        assert "--max-seq-len is 0; give 1 or more" in refused(kimik3(*words, "--max-seq-len", "0"), 2)
    long = (
        "generate",
        "--checkpoint",
        tmp_path,
        "--token-ids",
        "7,13",
        "--max-new-tokens",
        "99",
        "--max-seq-len",
        "100",
    )
    assert "the model's max_seq_len is 100" in refused(kimik3(*long), 2)


def test_bench_takes_a_directory_and_a_shorter_context(kimik3: Call, tmp_path: Path) -> None:
    save_mini(tmp_path)
    words = ("bench", "--checkpoint", tmp_path, "--max-seq-len", "64", "--new-tokens", "4", "--repeats", "1")
    assert "max_seq_len is 64" in refused(kimik3(*words, "--prompt-tokens", "61"), 2)


@pytest.mark.parametrize(
    ("generation", "config", "given", "ends"),
    [
        ({}, {}, [], True),  # nobody says anything: 0
        ({"eos_token_id": 5}, {}, [], False),
        ({"eos_token_id": [5, 0]}, {"eos_token_id": 5}, [], True),
        ({}, {"eos_token_id": 5}, [], False),
        ({"eos_token_id": 5}, {}, ["--eos-id", "0"], True),
    ],
)
def test_end_of_text(
    kimik3: Call, tmp_path: Path, generation: dict[str, int], config: dict[str, int], given: list[str], ends: bool
) -> None:
    """The model always writes 0; --eos-id comes first, then generation_config.json, then config.json, then 0."""
    folder = padded_folder(tmp_path, 64)
    (folder / "config.json").write_text(json.dumps(config_json(mini_config(config))), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    result = answer(kimik3(*GENERATE, folder, "--token-ids", "7", *given))
    assert result["finish_reason"] == ("eos" if ends else "length")


def test_a_file_beside_its_tokenizer_works_as_before(kimik3: Call, tmp_path: Path) -> None:
    mk(tmp_path / "a.pt")
    save_byte_tokenizer(tmp_path, 64)
    assert answer(kimik3(*GENERATE, tmp_path / "a.pt", "--prompt", "abc"))["checkpoint"]["format_version"] == 7
