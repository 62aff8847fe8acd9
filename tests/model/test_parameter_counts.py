"""Parameter counts by part, against numbers counted by hand; tied embeddings count once."""

from math import prod
from pathlib import Path
from typing import Any

import pytest
from checkpoints import mk
from hypothesis import given
from strategies import REPEATABLE, model_configs
from tensor_list import tensor_shapes

from kimik3_cli.engine.checkpoint.inspection import inspect_checkpoint
from kimik3_cli.engine.checkpoint.load import load_checkpoint_model
from kimik3_cli.engine.checkpoint.tensors import count_parameters, tensor_specs
from kimik3_cli.engine.config import KimiK3Config

MINI_PARTS = {
    "embedding": 2048,
    "head": 2048,
    "kda": 26568,
    "mla": 2844,
    "dense_ffn": 4608,
    "routed_experts": 9216,
    "shared_experts": 3072,
    "routing": 4952,
    "norms": 1056,
}


def test_mini(tmp_path: Path) -> None:
    mk(tmp_path / "mini.pt")
    counted = inspect_checkpoint(tmp_path / "mini.pt").parameters
    assert counted.parts.model_dump() == MINI_PARTS
    assert counted.total == sum(MINI_PARTS.values()) == 56412
    # 4 of 6 experts are not chosen, and the embedding is a lookup.
    assert counted.active == 56412 - 2048 - 9216 * 4 // 6
    assert load_checkpoint_model(tmp_path / "mini.pt")[1].parameters == 56412


@pytest.mark.parametrize(
    "held", [["embed_tokens.weight"], ["lm_head.weight"], ["embed_tokens.weight", "lm_head.weight"]]
)
def test_tied_embeddings_count_once(held: tuple[str, ...], tmp_path: Path) -> None:
    def edit(made: dict[str, Any]) -> None:
        table = made["model"].pop("embed_tokens.weight")
        made["model"] |= {name: table.clone() for name in held}

    mk(tmp_path / "tied.pt", {"tie_word_embeddings": True}, edit)
    result = inspect_checkpoint(tmp_path / "tied.pt")
    assert result.parameters.total == 54364
    assert sum(result.parameters.parts.model_dump().values()) == 54364
    assert result.tied_embeddings
    assert result.problems == []
    assert load_checkpoint_model(tmp_path / "tied.pt")[1].parameters == 54364


@REPEATABLE
@given(raw=model_configs())
def test_parts_add_up_to_the_tensors(raw: dict[str, Any]) -> None:
    config = KimiK3Config.from_dict(raw)
    counted = count_parameters(config, tensor_specs(config))
    assert counted.total == sum(counted.parts.model_dump().values())
    assert counted.total == sum(prod(shape) for shape in tensor_shapes(raw).values())
