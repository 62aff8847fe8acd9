"""`kimik3 generate`: its JSON, prompts, tokenizers, end of text, limits."""

from pathlib import Path
from typing import Any

import pytest
from checkpoints import ids, mk
from commandline import answer, refused
from comparison import load
from conftest import Call
from tokenizers import Tokenizer
from tokenizers_for_tests import EOS, save_byte_tokenizer

from kimik3_cli.engine.generation import generate_tokens

KEYS = ["checkpoint", "device", "precision", "prompt_token_ids", "generated_token_ids", "finish_reason"]


def text_of(checkpoint: Path, token_ids: list[int]) -> str:
    """What the tokenizer beside a checkpoint makes of ids, without any of our code."""
    text: str = Tokenizer.from_file(str(checkpoint.with_name("tokenizer.json"))).decode(token_ids)
    return text


@pytest.fixture
def unloadable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading weights fails the test: what this fixture guards has to be refused before."""

    def load(*_: object, **__: object) -> None:
        pytest.fail("weights were loaded")

    monkeypatch.setattr("kimik3_cli.engine.checkpoint.load.load_checkpoint_model", load)


def test_json_with_token_ids(kimik3: Call, mini: Path) -> None:
    words = ["generate", "--checkpoint", mini, "--token-ids", "7, 13,29", "--max-new-tokens", "5", "--eos-id", "63"]
    result = answer(kimik3(*words))
    assert list(result) == KEYS
    expected = {
        "path": str(mini),
        "format_version": 7,
        "step": None,
        "training_kda_backend": "chunkwise",
        "inference_kda_backend": "chunkwise",
        "parameters": 56_412,
        "vocab_size": 64,
        "max_seq_len": 512,
    }
    assert list(result["checkpoint"].items()) == list(expected.items())
    assert (result["device"], result["precision"]) == ("cpu", "fp32")
    assert result["prompt_token_ids"] == [7, 13, 29]
    assert result["generated_token_ids"] == generate_tokens(load(mini), [7, 13, 29], max_new_tokens=5, eos_id=63)
    assert result["finish_reason"] == "length"


def test_json_with_a_prompt(kimik3: Call, speaking: Path) -> None:
    words = ["generate", "--checkpoint", speaking, "--prompt", "To be", "--eos-id", "7", "--max-new-tokens", "20"]
    result = answer(kimik3(*words))
    assert list(result) == [*KEYS, "generated_text"]
    assert len(result["prompt_token_ids"]) == 5
    assert len(result["generated_token_ids"]) == 20


def test_sampling_repeats_with_its_seed(kimik3: Call, mini: Path) -> None:
    words = ["generate", "--checkpoint", mini, "--token-ids", "7", "--mode", "sample", "--temperature", "2"]
    first, again, other = (answer(kimik3(*words, "--seed", seed))["generated_token_ids"] for seed in ("7", "7", "8"))
    assert first == again != other
    expected = generate_tokens(load(mini), [7], mode="sample", temperature=2.0, seed=7)
    assert first == expected


@pytest.mark.parametrize(
    ("configured", "flag", "reason"),
    [
        (0, [], "eos"),
        ([5, 0], [], "eos"),
        (5, [], "length"),
        (None, [], "eos"),
        (5, ["--eos-id", "0"], "eos"),
        (0, ["--eos-id", "5"], "length"),
    ],
)
def test_end_of_text(kimik3: Call, tmp_path: Path, configured: object, flag: list[str], reason: str) -> None:
    """Greedy decoding of equal logits takes id 0; an EOS that ended the text is part of the new ids."""
    path = tmp_path / "silent.pt"
    mk(path, cfg={"eos_token_id": configured}, edit=lambda made: made["model"]["lm_head.weight"].zero_())
    result = answer(kimik3("generate", "--checkpoint", path, "--token-ids", "7", "--max-new-tokens", "3", *flag))
    assert result["finish_reason"] == reason
    assert result["generated_token_ids"] == ([0] if reason == "eos" else [0, 0, 0])


@pytest.mark.parametrize(
    ("configured", "tokenizer_eos", "flag", "reason"),
    [
        (5, EOS, [], "eos"),  # the tokenizer's, id 0, comes before the checkpoint's
        (5, None, [], "length"),
        (0, None, [], "eos"),
        (0, EOS, ["--eos-id", "5"], "length"),
    ],
)
def test_end_of_text_by_the_tokenizer(
    kimik3: Call, tmp_path: Path, configured: int, tokenizer_eos: str | None, flag: list[str], reason: str
) -> None:
    path = tmp_path / "silent.pt"
    mk(path, cfg={"eos_token_id": configured}, edit=lambda made: made["model"]["lm_head.weight"].zero_())
    save_byte_tokenizer(tmp_path, 64, tokenizer_eos)
    result = answer(kimik3("generate", "--checkpoint", path, "--prompt", "abc", "--max-new-tokens", "3", *flag))
    assert result["finish_reason"] == reason
    assert result["generated_text"] == ""  # special tokens are skipped


@pytest.mark.parametrize("size", [63, 65])
@pytest.mark.parametrize("command", ["generate", "logits"])
@pytest.mark.usefixtures("unloadable")
def test_a_tokenizer_of_another_length_is_refused(
    kimik3: Call, mini: Path, tmp_path: Path, size: int, command: str
) -> None:
    save_byte_tokenizer(tmp_path, size)
    message = refused(kimik3(command, "--checkpoint", mini, "--prompt", "abc", "--tokenizer", tmp_path), 3)
    assert f"has {size} tokens, but the checkpoint's vocab_size is 64" in message


def test_a_tokenizer_of_the_right_length_is_used(kimik3: Call, mini: Path, tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path, 64)
    result = answer(kimik3("generate", "--checkpoint", mini, "--prompt", "abc", "--tokenizer", tmp_path))
    assert result["prompt_token_ids"] == [1, 2, 3]


@pytest.mark.usefixtures("unloadable")
def test_without_any_tokenizer_the_message_says_what_to_give(kimik3: Call, mini: Path) -> None:
    message = refused(kimik3("generate", "--checkpoint", mini, "--prompt", "abc"), 3)
    assert message.endswith("give --tokenizer NAME_OR_DIR, or --token-ids instead of --prompt")


def test_generated_text_is_one_decode_of_all_new_ids(kimik3: Call, speaking: Path) -> None:
    """Characters of several tokens stay whole, and nothing is tidied up, whatever the prompt."""
    prompt = "日本 🙂 é , it 's ."
    words = ["generate", "--checkpoint", speaking, "--prompt", prompt, "--mode", "sample", "--temperature", "3"]
    result = answer(kimik3(*words, "--max-new-tokens", "100", "--eos-id", "7"))
    assert len(result["generated_token_ids"]) > 20
    assert result["generated_text"] == text_of(speaking, result["generated_token_ids"])
    assert text_of(speaking, result["prompt_token_ids"]) == prompt


@pytest.mark.parametrize(
    ("data", "prompt"),
    [
        (b"two\nlines\n", "two\nlines"),
        (b"two\nlines\n\n", "two\nlines\n"),
        (b"one\r\n", "one"),
        (b"one\r", "one\r"),
        ("日本 🙂\n".encode(), "日本 🙂"),
        (b"-\n", "-"),
    ],
)
def test_a_prompt_from_standard_input(kimik3: Call, speaking: Path, data: bytes, prompt: str) -> None:
    words = ["generate", "--checkpoint", speaking, "--max-new-tokens", "1", "--prompt", "-"]
    assert text_of(speaking, answer(kimik3(*words, stdin=data))["prompt_token_ids"]) == prompt


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "--prompt is '-', but standard input is empty; give at least one character"),
        (b"\n", "--prompt is '-', but standard input is empty; give at least one character"),
        (b"ab\xff", "--prompt is '-', but byte 2 of standard input is 0xff, which is not valid UTF-8; give UTF-8 text"),
    ],
)
@pytest.mark.usefixtures("unloadable")
def test_a_wrong_standard_input_exits_2(kimik3: Call, speaking: Path, data: bytes, message: str) -> None:
    assert refused(kimik3("generate", "--checkpoint", speaking, "--prompt", "-", stdin=data), 2) == message


def test_a_wrong_flag_is_refused_before_standard_input_is_read(kimik3: Call) -> None:
    message = refused(kimik3("generate", "--prompt", "-", "--max-new-tokens", "0", stdin=b"\xff"), 2)
    assert message == "--max-new-tokens is 0; give 1 or more"


@pytest.mark.parametrize(
    "words", [["--prompt", "- item"], ["--prompt=--json"], ["--prompt", "--json"], ["--prompt=-x"], ["--prompt=--"]]
)
def test_prompts_that_begin_with_a_dash_are_taken_literally(kimik3: Call, speaking: Path, words: list[str]) -> None:
    result = answer(kimik3("generate", "--checkpoint", speaking, "--max-new-tokens", "1", *words))
    assert text_of(speaking, result["prompt_token_ids"]) == words[-1].removeprefix("--prompt=")


@pytest.mark.usefixtures("unloadable")
def test_a_prompt_of_no_token_is_refused(kimik3: Call, mini: Path, tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path, 64)
    message = refused(kimik3("generate", "--checkpoint", mini, "--prompt", "12", "--tokenizer", tmp_path), 2)
    assert message == "--prompt '12' encodes to no token; give other text or --token-ids"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--token-ids", "7,64"], ["64", "0 to 63"]),
        (["--token-ids", "7", "--eos-id", "64"], ["--eos-id is 64", "0 to 63"]),
        (["--token-ids", "7", "--pad-id", "64"], ["--pad-id is 64", "0 to 63"]),
        (["--token-ids", ",".join(["7"] * 481)], ["481", "32", "513", "max_seq_len is 512"]),
        (["--token-ids", "7", "--max-new-tokens", "512"], ["513", "max_seq_len is 512"]),
        (["--token-ids", ",".join(["7"] * 513)], ["513", "max_seq_len is 512"]),
    ],
)
@pytest.mark.usefixtures("unloadable")
def test_what_the_model_cannot_hold_exits_2_before_weights_are_loaded(
    kimik3: Call, mini: Path, words: list[str], parts: list[str]
) -> None:
    message = refused(kimik3("generate", "--checkpoint", mini, *words), 2)
    assert all(part in message for part in parts), message


def test_a_request_that_just_fits_runs(kimik3: Call, mini: Path) -> None:
    prompt = ",".join(map(str, ids(510)))
    result = answer(kimik3("generate", "--checkpoint", mini, "--token-ids", prompt, "--max-new-tokens", "2"))
    assert len(result["prompt_token_ids"]) == 510


@pytest.mark.parametrize("mode", ["greedy", "sample"])
def test_non_finite_logits_exit_1_and_name_the_step(kimik3: Call, tmp_path: Path, mode: str) -> None:
    def damage(made: dict[str, Any]) -> None:
        made["model"]["norm.weight"][0] = float("nan")

    mk(tmp_path / "damaged.pt", edit=damage)
    words = ["--checkpoint", tmp_path / "damaged.pt", "--token-ids", "7,13", "--mode", mode]
    message = refused(kimik3("generate", *words), 1)
    assert "step 1 of generation: non-finite logits" in message
    assert "non-finite logits" in refused(kimik3("logits", *words[:4]), 1)


def test_pad_ids_are_ordinary_tokens_in_a_prompt(kimik3: Call, mini: Path) -> None:
    words = ["generate", "--checkpoint", mini, "--token-ids", "0,0,7", "--max-new-tokens", "2", "--eos-id", "63"]
    assert answer(kimik3(*words))["prompt_token_ids"] == [0, 0, 7]


def test_progress_is_told_to_the_caller(speaking: Path) -> None:
    from kimik3_cli.engine.service import run_generate
    from kimik3_cli.requests import GenerateRequest

    told: list[str] = []
    request = GenerateRequest.build(checkpoint=speaking, prompt="a", max_new_tokens=2, eos_id=7)
    run_generate(request, told.append)
    assert told == [
        "loading the tokenizer",
        "loading the model",
        "computing",
        "generating, 1 of 2 tokens",
        "generating, 2 of 2 tokens",
    ]
