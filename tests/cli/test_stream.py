"""`kimik3 generate` token by token: lines of JSON, text on a terminal, and every way of being cut short."""

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from select import select
from typing import Any

import pytest
from checkpoints import fill, mk
from commandline import (
    PROGRAM,
    TIMEOUT_S,
    Ran,
    answer,
    environment,
    error_line,
    interrupt_on_terminal,
    refused,
    run_on_terminal,
)
from conftest import Call

from kimik3_cli.engine import generation
from kimik3_cli.render.output import Output

SAMPLED = ["--mode", "sample", "--temperature", "3", "--seed", "1"]
# On the silent model: more lines than a pipe of one page holds, so that the program cannot end while nobody reads.
LONG = ["--token-ids", "7,13", "--max-new-tokens", "500", "--eos-id", "63"]
PAGE = 4096


def lines(ran: Ran) -> list[dict[str, Any]]:
    """The objects of a stream that ended well: one a line, without spaces, stderr empty."""
    assert (ran.code, ran.err) == (0, "")
    return whole_lines(ran.out)


def whole_lines(out: str) -> list[dict[str, Any]]:
    *found, last = out.split("\n")
    assert last == ""
    objects = [json.loads(line) for line in found]
    assert found == [json.dumps(each, separators=(",", ":"), ensure_ascii=False) for each in objects]
    return objects


def start(*words: str | Path, **variables: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [*PROGRAM, "generate", "--stream", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(**variables),
        bufsize=0,  # nothing is read ahead, so nothing is lost between readline and communicate
        pipesize=PAGE,
    )


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_pieces_of_text_add_up_to_the_result(kimik3: Call, speaking: Path, more: list[str]) -> None:
    """Bytes drawn at random are bad UTF-8 mostly; the last line is what generate prints without --stream."""
    words = [
        "generate",
        "--checkpoint",
        speaking,
        "--prompt",
        "日本 ",
        "--max-new-tokens",
        "200",
        "--eos-id",
        "7",
        *SAMPLED,
    ]
    *pieces, result = lines(kimik3(*words, "--stream", *more))
    assert all(list(piece) == ["token_id", "text"] for piece in pieces)
    assert [piece["token_id"] for piece in pieces] == result["generated_token_ids"]
    assert "".join(piece["text"] for piece in pieces) == result["generated_text"]
    assert "\ufffd" in result["generated_text"]
    assert result == answer(kimik3(*words))


def test_pieces_are_ids_without_a_tokenizer(kimik3: Call, mini: Path) -> None:
    words = ["generate", "--checkpoint", mini, "--token-ids", "7,13,29", "--max-new-tokens", "5", "--eos-id", "63"]
    *pieces, result = lines(kimik3(*words, "--stream"))
    assert pieces == [{"token_id": token_id} for token_id in result["generated_token_ids"]]
    assert result == answer(kimik3(*words))


def test_the_end_of_the_text_is_a_piece(kimik3: Call, silent: Path) -> None:
    """Greedy decoding of equal logits takes id 0, the end."""
    piece, result = lines(kimik3("generate", "--checkpoint", silent, "--token-ids", "7", "--stream"))
    assert piece == {"token_id": 0}
    assert result["finish_reason"] == "eos"


@pytest.mark.parametrize("sampling", [[], SAMPLED])
@pytest.mark.parametrize("length", [1, 80])
def test_without_a_cache_the_tokens_are_the_same(
    kimik3: Call, mini: Path, monkeypatch: pytest.MonkeyPatch, sampling: list[str], length: int
) -> None:
    prompt = ",".join(["7", "13"] * length)
    words = [
        "generate",
        "--checkpoint",
        mini,
        "--token-ids",
        prompt,
        "--max-new-tokens",
        "20",
        "--eos-id",
        "63",
        *sampling,
    ]
    cached = answer(kimik3(*words))
    monkeypatch.setattr(generation, "advance", lambda *_, **__: pytest.fail("a cache was used"))
    assert answer(kimik3(*words, "--no-cache")) == cached
    assert lines(kimik3(*words, "--no-cache", "--stream"))[-1] == cached


def test_without_a_cache_whole_chunks_must_fit(kimik3: Call, tmp_path: Path) -> None:
    equal = fill("lm_head.weight", 0.0)  # greedy decoding takes id 0 for ever
    mk(tmp_path / "odd.pt", cfg={"max_seq_len": 100}, edit=equal)
    words = ["generate", "--checkpoint", tmp_path / "odd.pt", "--token-ids", ",".join(["7"] * 70), "--eos-id", "63"]
    assert len(answer(kimik3(*words, "--max-new-tokens", "30"))["generated_token_ids"]) == 30
    for stream in ([], ["--stream"]):
        message = refused(kimik3(*words, "--max-new-tokens", "30", "--no-cache", *stream), 2)
        assert message.startswith("99 tokens fill 128 with kda_chunk_size 64, but max_seq_len is 100")


@pytest.mark.parametrize(
    ("words", "code"),
    [(["--token-ids", "7,64"], 2), (["--token-ids", "7", "--checkpoint", "no.pt"], 3), (["--prompt", "a"], 3)],
)
def test_what_is_refused_leaves_stdout_empty(kimik3: Call, mini: Path, words: list[str], code: int) -> None:
    assert refused(kimik3("generate", "--checkpoint", mini, "--stream", *words), code)


@pytest.mark.parametrize("unbuffered", [{}, {"PYTHONUNBUFFERED": "1"}])
def test_lines_arrive_while_the_program_still_works(silent: Path, unbuffered: dict[str, str]) -> None:
    process = start("--checkpoint", silent, *LONG, **unbuffered)
    assert process.stdout is not None
    first = process.stdout.readline()
    assert process.poll() is None
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    *pieces, result = whole_lines((first + out).decode())
    assert [piece["token_id"] for piece in pieces] == result["generated_token_ids"]
    assert len(pieces) == 500


@pytest.mark.parametrize("unbuffered", [{}, {"PYTHONUNBUFFERED": "1"}])
@pytest.mark.parametrize("count", [1, 30])
def test_an_interrupt_leaves_whole_lines_and_no_result(silent: Path, unbuffered: dict[str, str], count: int) -> None:
    process = start("--checkpoint", silent, *LONG, **unbuffered)
    assert process.stdout is not None
    read = b"".join(process.stdout.readline() for _ in range(count))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"")
    assert all(list(piece) == ["token_id"] for piece in whole_lines((read + out).decode()))


@pytest.mark.parametrize("unbuffered", [{}, {"PYTHONUNBUFFERED": "1"}])
def test_an_interrupt_inside_a_long_line_lets_it_end(tmp_path: Path, unbuffered: dict[str, str]) -> None:
    """The result holds a long prompt, more than the pipe and all buffers can take."""
    mk(tmp_path / "long.pt", cfg={"max_seq_len": 20_000})
    prompt = ",".join(["13"] * 15_000)
    process = start("--checkpoint", tmp_path / "long.pt", "--token-ids", prompt, "--max-new-tokens", "1", **unbuffered)
    assert process.stdout is not None
    piece = process.stdout.readline()
    assert select([process.stdout], [], [], TIMEOUT_S)[0]  # the result's beginning is there
    time.sleep(0.2)  # and the program waits for room for the rest
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"")
    _, result = whole_lines((piece + out).decode())
    assert len(result["prompt_token_ids"]) == 15_000


@pytest.mark.parametrize("more", [[], ["--no-cache"]])
def test_a_reader_that_stops_ends_the_program_quietly(silent: Path, more: list[str]) -> None:
    process = start("--checkpoint", silent, *LONG, *more)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    assert (process.stderr.read(), process.wait(60)) == (b"", 141)
    process.stderr.close()


def test_head_takes_one_line(silent: Path) -> None:
    script = '"$@" | head -1; echo "${PIPESTATUS[0]}"'
    command = ["bash", "-c", script, "bash", *PROGRAM, "generate", "--stream", "--checkpoint", str(silent), *LONG]
    done = subprocess.run(command, capture_output=True, env=environment(), text=True)
    piece, code = done.stdout.splitlines()
    assert (list(json.loads(piece)), code, done.stderr) == (["token_id"], "141", "")


@pytest.fixture
def failing(kimik3: Call, mini: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """A command line whose model fails at the second step, as the first new token's embedding is damaged."""
    words = ["--token-ids", "7,13", "--eos-id", "63"]
    token_id = answer(kimik3("generate", "--checkpoint", mini, *words))["generated_token_ids"][0]

    def damage(made: dict[str, Any]) -> None:
        made["model"]["embed_tokens.weight"][token_id] = float("nan")

    mk(tmp_path / "failing.pt", edit=damage)
    return lambda *more: ["generate", "--checkpoint", str(tmp_path / "failing.pt"), *words, *more]


def test_a_failure_in_the_middle_keeps_the_lines_before_it(kimik3: Call, failing: Callable[..., list[str]]) -> None:
    assert "step 2 of generation: non-finite logits" in refused(kimik3(*failing()), 1)
    ran = kimik3(*failing("--stream"))
    assert ran.code == 1
    assert [list(piece) for piece in whole_lines(ran.out)] == [["token_id"]]
    assert error_line(ran.err).startswith("step 2 of generation: non-finite logits")
    error = json.loads(kimik3(*failing("--stream", "--json")).err)["error"]
    assert error["kind"] == "non_finite"


def test_a_failure_in_the_middle_ends_the_line_on_a_terminal(failing: Callable[..., list[str]]) -> None:
    ran = run_on_terminal(*failing(), "--quiet", NO_COLOR="1")
    assert ran.code == 1
    assert ran.out.startswith("7 13 ")
    assert ran.out.count("\n") == 1
    assert ran.out.endswith("\n")
    assert error_line(ran.err).startswith("step 2 of generation")


def test_a_terminal_shows_prompt_text_and_facts(kimik3: Call, speaking: Path) -> None:
    """Without colours, the text is there to the letter, control characters escaped."""
    words = ["generate", "--checkpoint", speaking, "--prompt", "To be\x1b[7m", "--eos-id", "7", *SAMPLED]
    text = answer(kimik3(*words, "--max-new-tokens", "60"))["generated_text"]
    ran = run_on_terminal(*words, "--max-new-tokens", "60", "--stream", columns=200, NO_COLOR="1")
    assert (ran.code, ran.err) == (0, "")
    shown, facts = ran.out.split("\n\n60 new tokens, length reached  |  ")
    assert shown == visible("To be\x1b[7m" + text)
    assert facts.endswith("  |  cpu, fp32\n")


def visible(text: str) -> str:
    """What a terminal is to get of a text, by another rule than the program's own."""
    return "".join(each if each in "\n\t" or each.isprintable() else repr(each)[1:-1] for each in text)


def test_a_terminal_shows_ids_without_a_tokenizer(kimik3: Call, mini: Path) -> None:
    words = ["generate", "--checkpoint", mini, "--token-ids", "7,13", "--max-new-tokens", "3", "--eos-id", "63"]
    ids = answer(kimik3(*words))["generated_token_ids"]
    assert run_on_terminal(*words, NO_COLOR="1").out.splitlines()[0] == "7 13 " + " ".join(map(str, ids))


def test_lines_of_json_on_a_terminal(silent: Path) -> None:
    ran = run_on_terminal("generate", "--stream", "--json", "--checkpoint", silent, *LONG, "--quiet")
    assert len(lines(ran)) == 501


@pytest.mark.parametrize("words", [["--prompt", "To be"], ["--prompt", "To be", "--stream", "--json"]])
def test_an_interrupt_on_a_terminal_ends_the_line(speaking: Path, words: list[str]) -> None:
    slow = ["--no-cache", "--max-new-tokens", "400", "--eos-id", "7", "--quiet"]
    ran = interrupt_on_terminal("generate", "--checkpoint", speaking, *words, *slow)
    assert (ran.code, ran.err) == (130, "")
    assert ran.out.endswith("\n")
    assert "new tokens" not in ran.out
    if "--json" in words:
        assert all(list(piece) == ["token_id", "text"] for piece in whole_lines(ran.out))
    else:
        assert ran.out.startswith("\x1b[2mTo be\x1b[0m")  # the style ends with the prompt


def test_stdout_stays_clean_between_items(capsys: pytest.CaptureFixture[str]) -> None:
    def noisy(update: Callable[[str], None]) -> Iterator[str]:
        for item in ("1", "2"):
            print("noise")
            yield item
        print("noise")

    output = Output(as_json=True)
    for item in output.as_they_come("working", noisy):
        output.emit_json(item)
    assert tuple(capsys.readouterr()) == ("1\n2\n", "noise\n" * 3)
