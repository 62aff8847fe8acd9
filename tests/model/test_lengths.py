"""Every prompt length, chunk multiples and their neighbours included, from logits to generated ids."""

from pathlib import Path

import pytest
from checkpoints import ids, mk
from comparison import CLEAR_ROUTING, assert_close, load
from oracle import OracleRun, oracle_run

from kimik3_cli.engine.generation import generate_tokens, next_token_logits
from kimik3_cli.engine.model.decoder import KimiK3

LONGEST = 130
EOS = 63


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> KimiK3:
    path = tmp_path_factory.mktemp("lengths") / "mini.pt"
    mk(path)
    return load(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> OracleRun:
    run = oracle_run(mk(tmp_path_factory.mktemp("lengths") / "mini.pt"), ids(LONGEST))
    assert run.routing_gap > CLEAR_ROUTING
    return run


def recomputed(model: KimiK3, prompt: list[int], count: int) -> list[int]:
    """Greedy ids from one stateless pass a token, up to the end of text."""
    new: list[int] = []
    while len(new) < count and EOS not in new:
        new.append(int(next_token_logits(model, prompt + new).argmax()))
    return new


@pytest.mark.parametrize("length", range(1, LONGEST + 1))
def test_every_length(length: int, model: KimiK3, run: OracleRun) -> None:
    prompt = ids(LONGEST)[:length]
    assert_close(next_token_logits(model, prompt), run.logits[length - 1])
    assert generate_tokens(model, prompt, max_new_tokens=3, eos_id=EOS) == recomputed(model, prompt, 3)


@pytest.mark.parametrize("kernel", [1, 2, 4, 6])
@pytest.mark.parametrize("prompt", [[7], [7, 13], [7, 13, 29]])
def test_prompts_shorter_than_the_convolution(kernel: int, prompt: list[int], tmp_path: Path) -> None:
    made = mk(tmp_path / "kernel.pt", lin={"short_conv_kernel_size": kernel})
    model = load(tmp_path / "kernel.pt")
    new = generate_tokens(model, prompt, max_new_tokens=8, eos_id=EOS)
    assert new == recomputed(model, prompt, 8)
    logits = oracle_run(made, prompt + new).logits[len(prompt) - 1 : -1]
    assert new == logits.argmax(-1).tolist()


def test_the_pad_id_changes_nothing(model: KimiK3) -> None:
    """Padding follows the last real token, so no id in it can be seen; inside a prompt it is an ordinary token."""
    for length in (1, 63, 64, 65):
        prompt = ids(length)
        logits = [next_token_logits(model, prompt, pad_id=pad_id) for pad_id in (None, 0, 5, 63)]
        for other in logits[1:]:
            assert_close(other, logits[0])
    assert not next_token_logits(model, [7, 0]).allclose(next_token_logits(model, [7]))
