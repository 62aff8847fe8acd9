"""The pictures of results: what they show, at any width, and that no text of a file reaches the terminal raw."""

import io
from typing import Any

import pytest
from rich.console import Console, Group, RenderableType

from kimik3_cli.render.convert import convert_view
from kimik3_cli.render.human import generate_facts, inspect_view, logits_view, piece_text, prompt_view
from kimik3_cli.render.output import one_line, printable
from kimik3_cli.results import ConvertResult, GenerateResult, InspectResult, LogitsResult, StreamPiece

CHECKPOINT = {
    "path": "last.pt",
    "format_version": 7,
    "step": 1200,
    "training_kda_backend": "fused",
    "inference_kda_backend": "chunkwise",
    "parameters": 56_412,
    "vocab_size": 64,
    "max_seq_len": 512,
}
BASE = {"checkpoint": CHECKPOINT, "device": "cpu", "precision": "fp32", "prompt_token_ids": [7, 13]}
PARTS = ["embedding", "head", "kda", "mla", "dense_ffn", "routed_experts", "shared_experts", "routing", "norms"]
HOSTILE = "\x1b[31m[bold]\x9b2J[/]\x07\u202e"
SHOWN = "\\x1b[31m[bold]\\x9b2J[/]\\x07\\u202e"


def drawn(picture: RenderableType, width: int = 80, *, encoding: str = "utf-8") -> str:
    """What a terminal of this width gets, without colours."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=stream, width=width, color_system=None, force_terminal=True, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(picture, crop=False)
    return capture.get()


def generated() -> GenerateResult:
    return GenerateResult(**BASE, generated_token_ids=[5, 9], finish_reason="eos")


def inspected(**more: Any) -> InspectResult:
    values: dict[str, Any] = {
        "path": "last.pt",
        "file_size": 297_000,
        "format_version": 7,
        "config": {"num_hidden_layers": 5, "linear_attn_config": {"kda_layers": [1, 2, 3, 5], "full_attn_layers": [4]}},
        "training_kda_backend": "chunkwise",
        "step": 123,
        "stripped_prefix": "",
        "tokenizer": None,
        "parameters": {"total": 1000, "active": 800, "parts": {**dict.fromkeys(PARTS, 100), "kda": 200}},
        "dtypes": [{"dtype": "float32", "tensors": 1, "parameters": 1000, "bytes": 4000}],
        "bytes": 4000,
        "tied_embeddings": False,
        "trainer_state": [],
        "memory": {
            "weights_bytes": 4000,
            "cache_bytes_fixed": 12_800,
            "cache_bytes_per_token": 64,
            "machine_bytes": 10**9,
            "fits": True,
        },
        "problems": [],
    }
    return InspectResult(**{**values, **more})


def scored(logprobs: list[float], **text: str) -> LogitsResult:
    top = [{"token_id": i, "logit": 1.5, "logprob": logprob, **text} for i, logprob in enumerate(logprobs)]
    return LogitsResult(**BASE, vocab_size=64, top=top)


def test_prompt_and_facts_stand_around_the_text() -> None:
    assert drawn(Group(prompt_view("To be, or not"), generate_facts(generated())), 100).splitlines() == [
        "To be, or not",
        "",
        "2 new tokens, end of text  |  last.pt, 56.4K parameters, step 1,200  |  cpu, fp32",
    ]


def test_a_prompt_is_shown_exactly() -> None:
    """No line is broken, no end stripped, no tab expanded: the text goes on where the prompt ends."""
    prompt = "word " * 100 + "\n\n\ttab \n  "
    assert drawn(prompt_view(prompt), 40) == prompt


def test_pieces_show_text_or_ids() -> None:
    assert piece_text(StreamPiece(token_id=5, text=" be\n")) == " be\n"
    assert piece_text(StreamPiece(token_id=5, text="")) == ""
    assert piece_text(StreamPiece(token_id=5)) == " 5"
    assert piece_text(StreamPiece(token_id=5, text=HOSTILE)) == SHOWN


@pytest.mark.parametrize("width", [40, 80, 200])
def test_bars_are_in_proportion(width: int) -> None:
    lines = drawn(logits_view(scored([-0.7, -1.4, -80.0])), width).splitlines()
    bars = [line.count("█") for line in lines[1:4]]
    assert bars[0] == min(40, width - max(len(line.rstrip(" █")) for line in lines[1:4]) - 2)
    assert bars[1] == round(bars[0] * 0.4966)
    assert bars[2] == 1  # almost nothing is still something
    assert "49.7%" in lines[1]


def test_bars_without_unicode() -> None:
    picture = drawn(logits_view(scored([-0.7])), encoding="ascii")
    assert "####" in picture
    assert picture.isascii()


def test_tokens_are_quoted() -> None:
    assert '"\\n\\t"' in drawn(logits_view(scored([-0.1], text="\n\t")))
    assert "token" not in drawn(logits_view(scored([-0.1]))).splitlines()[0]


def test_the_logits_beyond_the_table_are_pointed_to() -> None:
    shown = scored([-0.1])
    assert "--json prints all logits" in drawn(logits_view(shown.model_copy(update={"logits": [0.5]})))
    assert "all logits written to x.npy" in drawn(logits_view(shown.model_copy(update={"output": "x.npy"})))
    assert "all logits" not in drawn(logits_view(shown))


def test_all_probability_lost_is_no_crash() -> None:
    assert "0.0%" in drawn(logits_view(scored([-1e9])))


def test_inspection_is_a_tree() -> None:
    picture = drawn(inspect_view(inspected()))
    assert picture.startswith("last.pt  297 kB, format 7\n├── model  1,000 parameters, 800 active per token\n")
    assert "KDA             200  20.0%  ███" in picture
    assert "5 layers: 4 KDA, 1 full attention" in picture
    assert "cache 12.8 kB fixed + 64 B a token" in picture
    assert picture.endswith("└── no problems in the structure; --deep also reads the data\n")
    assert drawn(inspect_view(inspected(records_verified=3))).endswith("└── no problems\n")


def test_a_directory_shows_its_files_and_what_would_hold_it() -> None:
    memory = {**inspected().memory.model_dump(), "fits": False, "advice": "the weights need 11.1 TB"}
    shards = [{"name": f"model-{number}.safetensors", "bytes": 10, "tensors": 600} for number in (1, 2)]
    values: dict[str, Any] = {"format_version": None, "shards": shards, "skipped": {"tensors": 168, "bytes": 9000}}
    picture = drawn(inspect_view(inspected(**values, memory=memory, records_verified=0, stripped_prefix="model.")))
    assert picture.startswith("last.pt  297 kB, Hugging Face directory\n")
    assert "the weights need 11.1 TB" in picture
    assert "2 safetensors files with 1,200 tensors" in picture
    assert "168 vision tensors skipped, 9 kB" in picture
    assert "prefix model. stripped from most names" in picture
    assert "values read; safetensors has no checksums" in picture
    assert "trainer" not in picture


def test_problems_are_all_listed() -> None:
    problems = [{"kind": "missing", "name": f"t{i}", "message": f"t{i} is missing"} for i in range(300)]
    picture = drawn(inspect_view(inspected(problems=problems)))
    assert "300 problems" in picture
    assert all(f"t{i} is missing" in picture for i in range(300))


def test_a_long_trainer_state_is_cut() -> None:
    entries = [{"name": f"optimizer.{i}", "kind": "float32 [2]", "bytes": 8} for i in range(50)]
    picture = drawn(inspect_view(inspected(trainer_state=entries)))
    assert "optimizer.19  float32 [2]  8 B" in picture
    assert "optimizer.20" not in picture
    assert "and 30 more, which --json lists" in picture


def test_tensors_are_a_table() -> None:
    tensors = [{"name": "norm.weight", "shape": [2, 3], "dtype": "float32", "bytes": 24}]
    assert "norm.weight  2 x 3  float32     24" in drawn(inspect_view(inspected(tensors=tensors)))


def test_no_text_of_a_file_reaches_the_terminal_raw() -> None:
    pictures = [
        drawn(prompt_view(HOSTILE)),
        drawn(logits_view(scored([-0.1], text=HOSTILE))),
        drawn(
            inspect_view(
                inspected(
                    path=HOSTILE,
                    stripped_prefix=HOSTILE,
                    tokenizer={"name_or_path": HOSTILE, "revision": HOSTILE},
                    trainer_state=[{"name": HOSTILE, "kind": "str", "bytes": 0, "value": HOSTILE}],
                    problems=[{"kind": "unexpected", "name": HOSTILE, "message": HOSTILE}],
                    tensors=[{"name": HOSTILE, "shape": [], "dtype": "float32", "bytes": 4}],
                )
            ),
            200,
        ),
    ]
    for picture, count in zip(pictures, (1, 1, 8), strict=True):
        assert picture.count(SHOWN) == count
        assert not set(HOSTILE) & set("\x1b\x9b\x07\u202e") & set(picture)


def test_printable_keeps_what_is_harmless() -> None:
    assert printable("é 日本 🙂\u200d🙂 \n\t[x]") == "é 日本 🙂\u200d🙂 \n\t[x]"
    assert printable("\x00\x1b\x7f\x9b\r\udcff\u2028") == "\\x00\\x1b\\x7f\\x9b\\r\\udcff\\u2028"


def test_one_line_joins_lines() -> None:
    assert one_line("  a\nb\r\n\n  c\u2028d\x0be ") == "a b c d e"


def test_a_conversion_shows_what_was_written_and_what_was_not() -> None:
    page = drawn(
        convert_view(
            ConvertResult.model_validate(
                {
                    "source": "last.pt",
                    "destination": HOSTILE,
                    "layout": "kimi_linear",
                    "tensors": 1200,
                    "parameters": 56_412,
                    "bytes": 112_824,
                    "dtypes": [{"dtype": "bfloat16", "tensors": 1200, "parameters": 56_412, "bytes": 112_824}],
                    "dropped": ["step", HOSTILE],
                    "files": [{"name": "model.safetensors", "bytes": 112_900, "sha256": "ab" * 32}],
                }
            )
        ),
        width=120,
    )
    assert f"{SHOWN}: Kimi Linear directory" in page
    assert "1,200 tensors, 56,412 parameters (56,412 in bfloat16)" in page
    assert f"not carried over: step, {SHOWN}" in page
    assert "ab" * 32 in page
    assert "\x1b[31m" not in page
