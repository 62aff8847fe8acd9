"""What ends a generation: end-of-text ids, 0 among them, the length, and non-finite logits."""

from pathlib import Path
from typing import Any

import pytest
from checkpoints import fill, mk
from comparison import load

from kimik3_cli.engine.generation import generate_tokens, next_token_logits, stream_tokens
from kimik3_cli.errors import NonFiniteError

# A head of zeros makes all logits equal, and greedy decoding takes the lowest id, 0.
ALWAYS_0 = fill("lm_head.weight", 0.0)


@pytest.mark.parametrize(
    ("configured", "asked", "reason"),
    [
        (0, None, "eos"),
        ([5, 0], None, "eos"),
        (5, None, "length"),
        ([5, 6], None, "length"),
        (5, 0, "eos"),
        (5, [9, 0], "eos"),
        (0, 5, "length"),
        ([5, 0], [5], "length"),
        (None, None, "eos"),
        (None, 5, "length"),
    ],
)
def test_end_of_text(configured: Any, asked: Any, reason: str, tmp_path: Path) -> None:
    mk(tmp_path / "zero.pt", {"eos_token_id": configured}, ALWAYS_0)
    steps = list(stream_tokens(load(tmp_path / "zero.pt"), [7, 13], max_new_tokens=4, eos_id=asked))
    assert [token for token, _ in steps] == ([0] if reason == "eos" else [0, 0, 0, 0])
    assert [given for _, given in steps] == [None] * (len(steps) - 1) + [reason]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("norm.weight", float("nan")),
        ("norm.weight", float("inf")),
        ("lm_head.weight", float("inf")),
        ("lm_head.weight", float("-inf")),
        ("layers.2.self_attn.A_log", float("nan")),
        ("layers.3.self_attn.kv_b_proj.weight", float("nan")),
        ("layers.1.block_sparse_moe.gate.weight", float("nan")),
    ],
)
def test_non_finite_weights(name: str, value: float, tmp_path: Path) -> None:
    def edit(made: dict[str, Any]) -> None:
        made["model"][name].view(-1)[0] = value

    mk(tmp_path / "bad.pt", edit=edit)
    model, prompt = load(tmp_path / "bad.pt"), [7, 13]
    with pytest.raises(NonFiniteError, match="non-finite"):
        next_token_logits(model, prompt)
    for mode in ("greedy", "sample"):
        with pytest.raises(NonFiniteError, match=r"step 1\b.*non-finite|non-finite.*step 1\b"):
            generate_tokens(model, prompt, mode=mode, max_new_tokens=4)


def test_the_step_of_a_later_failure_is_named(tmp_path: Path) -> None:
    """Token 0 has a poisoned embedding and is generated first, so the second step fails."""

    def edit(made: dict[str, Any]) -> None:
        ALWAYS_0(made)
        made["model"]["embed_tokens.weight"][0] = float("nan")

    mk(tmp_path / "later.pt", {"pad_token_id": 1}, edit)
    model = load(tmp_path / "later.pt")
    with pytest.raises(NonFiniteError, match=r"step 2\b"):
        generate_tokens(model, [7, 13], max_new_tokens=4, eos_id=5)


def test_greedy_takes_the_lowest_id_among_equals(tmp_path: Path) -> None:
    def edit(made: dict[str, Any]) -> None:
        ALWAYS_0(made)
        made["model"]["lm_head.weight"][[41, 20]] = 1.0

    mk(tmp_path / "ties.pt", edit=edit)
    model = load(tmp_path / "ties.pt")
    chosen = set()
    for token in range(1, 30):
        logits = next_token_logits(model, [token]).tolist()
        assert logits[20] == logits[41]
        new = generate_tokens(model, [token], max_new_tokens=1, eos_id=63)
        assert new == [logits.index(max(logits))]
        chosen.update(new)
    assert chosen == {0, 20}
