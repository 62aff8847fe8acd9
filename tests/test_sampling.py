"""Choosing a token: the candidates, their odds, and that nothing else has a say."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from checkpoints import mk
from comparison import load
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import REPEATABLE

from kimik3_cli.engine import generate_tokens, select_token
from kimik3_cli.errors import NonFiniteError, RequestError

FOUR = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()


def drawn(logits: torch.Tensor, count: int, **options: Any) -> Counter[int]:
    return Counter(
        select_token(logits, "sample", generator=torch.Generator().manual_seed(seed), **options)
        for seed in range(count)
    )


def test_the_token_that_crosses_top_p_stays() -> None:
    """Before token 2 the sum is 0.7 < 0.8, before token 3 it is 0.9: odds 4 to 3 to 2 to 0."""
    counts = drawn(FOUR, 10_000, top_p=0.8)
    assert set(counts) == {0, 1, 2}
    for token, share in enumerate((4 / 9, 3 / 9, 2 / 9)):
        deviation = math.sqrt(share * (1 - share) * 10_000)
        assert abs(counts[token] - share * 10_000) < 4 * deviation


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 4}, {0, 1, 2, 3}),
        ({"top_k": 10**9}, {0, 1, 2, 3}),
        ({"top_p": 0.39}, {0}),
        ({"top_p": 1e-9}, {0}),
        ({"top_k": 3, "top_p": 0.4}, {0}),  # of the three, token 0 has 4/9 already
        ({"temperature": 1e-30}, {0}),
        ({"temperature": 1e-320}, {0}),
        ({"temperature": 1e30, "top_k": 3}, {0, 1, 2}),
    ],
    ids=str,
)
def test_who_can_be_drawn(options: dict[str, Any], left: set[int]) -> None:
    assert set(drawn(FOUR, 300, **options)) == left


def by_the_book(logits: list[float], temperature: float, top_k: int, top_p: float) -> set[int]:
    """The candidates by sorting and adding up in float64, one after the other."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:top_k]
    weights = [math.exp((logits[token] - logits[order[0]]) / temperature) for token in order]
    kept, before = set(), 0.0
    for token, weight in zip(order, weights, strict=True):
        if before / sum(weights) >= top_p:
            break
        kept.add(token)
        before += weight
    return kept


@settings(REPEATABLE, max_examples=200)
@given(
    logits=st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=12),
    temperature=st.sampled_from([0.5, 1.0, 3.0]),
    top_k=st.integers(1, 15),
    top_p=st.sampled_from([0.013, 0.237, 0.511, 0.773, 1.0]),
)
def test_only_the_candidates_of_the_definition(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    seen = drawn(torch.tensor(logits), 40, temperature=temperature, top_k=top_k, top_p=top_p)
    assert set(seen) <= by_the_book(logits, temperature, top_k, top_p)


def test_equal_logits_are_ordered_by_id() -> None:
    assert select_token(torch.tensor([1.0, 5.0, 5.0, 2.0, 5.0])) == 1
    assert set(drawn(torch.tensor([1.0, 5.0, 5.0, 2.0, 5.0]), 200, top_k=2)) == {1, 2}
    assert select_token(torch.zeros(5000)) == 0


def test_greedy_ignores_the_sampling_values() -> None:
    assert select_token(FOUR, "greedy", temperature=0.0, top_k=-1, top_p=7.0) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "--temperature is 0.0"),
        ({"temperature": -1.0}, "--temperature is -1.0"),
        ({"temperature": math.nan}, "--temperature is nan"),
        ({"temperature": math.inf}, "--temperature is inf"),
        ({"top_p": 0.0}, "--top-p is 0.0"),
        ({"top_p": 1.5}, "--top-p is 1.5"),
        ({"top_p": math.nan}, "--top-p is nan"),
        ({"top_k": 0}, "--top-k is 0"),
        ({"top_k": -1}, "--top-k is -1"),
    ],
    ids=str,
)
def test_values_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        select_token(FOUR, "sample", **options)


@pytest.mark.parametrize("mode", ["greedy", "sample"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_logits_are_an_error(mode: str, value: float) -> None:
    with pytest.raises(NonFiniteError, match="not finite"):
        select_token(torch.tensor([0.0, value, 1.0]), mode)


def test_an_unknown_mode() -> None:
    with pytest.raises(RequestError, match="--mode is 'beam'; give greedy or sample"):
        select_token(FOUR, "beam")


def test_a_seed_decides_and_the_global_generator_has_no_say(tmp_path: Any) -> None:
    mk(tmp_path / "mini.pt")
    model = load(tmp_path / "mini.pt")
    before = torch.get_rng_state()
    texts = [
        generate_tokens(model, [7, 13], max_new_tokens=20, mode="sample", seed=seed, eos_id=63) for seed in (7, 7, 8)
    ]
    assert torch.equal(torch.get_rng_state(), before)
    assert texts[0] == texts[1] != texts[2]
    torch.manual_seed(99)
    assert generate_tokens(model, [7, 13], max_new_tokens=20, mode="sample", seed=7, eos_id=63) == texts[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_any_floating_dtype(dtype: torch.dtype) -> None:
    assert select_token(torch.tensor([0.0, 3.0, 1.0], dtype=dtype)) == 1
