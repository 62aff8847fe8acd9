"""What is refused without reading any checkpoint, and in which words."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimik3_cli.errors import RequestError
from kimik3_cli.requests import GenerateRequest, InspectRequest, LogitsRequest, check_sampling, parse_token_ids

BASE = {"checkpoint": "any.pt", "token_ids": "7,13"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"top_k": "x"}, "--top-k is 'x'; give a whole number"),
        ({"top_k": "7.0"}, "--top-k is '7.0'; give a whole number"),
        ({"top_k": 7.0}, "--top-k is 7.0; give a whole number"),
        ({"top_k": True}, "--top-k is True; give a whole number"),
        ({"max_new_tokens": "0"}, "--max-new-tokens is 0; give 1 or more"),
        ({"max_new_tokens": ""}, "--max-new-tokens is ''; give a whole number"),
        ({"temperature": "warm"}, "--temperature is 'warm'; give a number"),
        ({"mode": "beam"}, "--mode is 'beam'; give greedy or sample"),
        ({"device": "gpu"}, "--device is 'gpu'; give auto, cpu, cuda or cuda:N"),
        ({"device": "cuda:"}, "--device is 'cuda:'; give auto, cpu, cuda or cuda:N"),
        ({"device": "CPU"}, "--device is 'CPU'; give auto, cpu, cuda or cuda:N"),
        ({"precision": "fp16"}, "--precision is 'fp16'; give fp32 or bf16"),
        ({"backend": "fast"}, "--backend is 'fast'; give chunkwise or fused"),
        ({"pad_id": "-1"}, "--pad-id is -1; give a token id, 0 or more"),
        ({"eos_id": "-1"}, "--eos-id is -1; give a token id, 0 or more"),
        ({"eos_id": "9" * 5000}, f"--eos-id is '{'9' * 59}...; give a smaller number"),
        ({"checkpoint": ""}, "--checkpoint is ''; give the name of a file"),
        ({"tokenizer": "", "token_ids": None, "prompt": "x"}, "--tokenizer is ''; give at least one character"),
        ({"prompt": "", "token_ids": None}, "--prompt is ''; give at least one character"),
        ({"prompt": "a\udcff", "token_ids": None}, "--prompt is 'a\\udcff'; give valid UTF-8 text"),
        ({"prompt": "x"}, "both of --prompt and --token-ids given; give exactly one"),
        ({"token_ids": None}, "neither of --prompt and --token-ids given; give exactly one"),
        ({"token_ids": []}, "--token-ids is empty; give at least one token id"),
        ({"token_ids": [7, True]}, "--token-ids is True; give a whole number"),
    ],
)
def test_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as refused:
        GenerateRequest.build(**{**BASE, **values})
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": "0"}, "--temperature is 0.0; give a finite value above 0, or --mode greedy"),
        ({"temperature": "-1"}, "--temperature is -1.0; give a finite value above 0, or --mode greedy"),
        ({"temperature": "nan"}, "--temperature is nan; give a finite value above 0, or --mode greedy"),
        ({"temperature": "inf"}, "--temperature is inf; give a finite value above 0, or --mode greedy"),
        ({"top_p": "0"}, "--top-p is 0.0; give a value above 0 and at most 1"),
        ({"top_p": "1.5"}, "--top-p is 1.5; give a value above 0 and at most 1"),
        ({"top_p": "nan"}, "--top-p is nan; give a value above 0 and at most 1"),
        ({"top_k": "0"}, "--top-k is 0; give 1 or more"),
        ({"top_k": "-1"}, "--top-k is -1; give 1 or more"),
        ({"seed": "-1"}, "--seed is -1; give a value from 0 to 2^63 - 1"),
        ({"seed": str(2**63)}, f"--seed is {2**63}; give a value from 0 to 2^63 - 1"),
    ],
)
def test_sampling_values_count_in_sample_mode_only(values: dict[str, str], message: str) -> None:
    assert GenerateRequest.build(**BASE, **values, mode="greedy").mode == "greedy"
    with pytest.raises(RequestError) as refused:
        GenerateRequest.build(**BASE, **values, mode="sample")
    assert str(refused.value) == message


@pytest.mark.parametrize(
    "values", [{"temperature": "1e-9"}, {"top_p": "1"}, {"seed": str(2**63 - 1)}, {"top_k": "999999"}]
)
def test_sampling_values_at_the_edge_are_accepted(values: dict[str, str]) -> None:
    assert GenerateRequest.build(**BASE, **values, mode="sample").mode == "sample"


def test_an_unknown_mode_is_refused_by_the_shared_check() -> None:
    with pytest.raises(RequestError, match=r"--mode is 'beam'; give greedy or sample"):
        check_sampling("beam", 1.0, 50, 1.0)


@pytest.mark.parametrize("output", ["logits.bin", "logits", "logits.npy.gz", "logits.NPY"])
def test_output_names_its_format(output: str) -> None:
    with pytest.raises(RequestError) as refused:
        LogitsRequest.build(**BASE, output=output)
    assert str(refused.value) == f"--output is {output!r}; give a name that ends in .npy, .safetensors, .pt"


def test_output_needs_its_folder(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"--output is '.*/none/x.npy'; the folder '.*/none' does not exist"):
        LogitsRequest.build(**BASE, output=str(tmp_path / "none" / "x.npy"))
    (tmp_path / "x.npy").mkdir()
    with pytest.raises(RequestError, match=r"which is a folder; give the name of a file"):
        LogitsRequest.build(**BASE, output=str(tmp_path / "x.npy"))


def test_top_is_at_least_1() -> None:
    with pytest.raises(RequestError, match=r"--top is 0; give 1 or more"):
        LogitsRequest.build(**BASE, top="0")


def test_inspection_names_its_argument() -> None:
    with pytest.raises(RequestError, match=r"PATH is ''; give the name of a file"):
        InspectRequest.build(path="")


@pytest.mark.parametrize("text", ["", ",", "7,", "7,-1", "7;13", "0x7", "7.0", "1_000", "1e3", "٣", "seven", "9" * 19])
def test_token_ids_are_decimal_digits(text: str) -> None:
    with pytest.raises(RequestError, match=r"^--token-ids holds '.*'; give comma-separated non-negative integers"):
        parse_token_ids(text)


@given(st.lists(st.integers(0, 10**18 - 1), min_size=1), st.sampled_from([",", ", ", " ,\t"]))
def test_token_ids_read_back(ids: list[int], separator: str) -> None:
    assert parse_token_ids(separator.join(map(str, ids))) == ids


def test_values_may_be_text_or_numbers() -> None:
    texts = {"max_new_tokens": "3", "temperature": "0.5", "top_k": "4", "top_p": "0.9", "seed": "5", "eos_id": "0"}
    numbers = {"max_new_tokens": 3, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "seed": 5, "eos_id": 0}
    from_numbers = GenerateRequest.build(checkpoint="any.pt", token_ids=[7, 13], **numbers)
    assert GenerateRequest.build(**BASE, **texts) == from_numbers
