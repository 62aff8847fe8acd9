"""Tied embeddings: a file may carry either table or both, and both must be equal."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import mk
from findings import Edit, problems

from kimik3_cli.engine.checkpoint.inspection import inspect_checkpoint
from kimik3_cli.engine.checkpoint.load import load_checkpoint_model
from kimik3_cli.errors import CheckpointError

TIED = {"tie_word_embeddings": True}
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


def with_tables(**tables: torch.Tensor) -> Edit:
    """An edit that leaves only the given tables, called embedding and head."""

    def edit(made: dict[str, Any]) -> None:
        made["model"].pop(EMBEDDING)
        made["model"] |= {EMBEDDING if name == "embedding" else HEAD: table for name, table in tables.items()}

    return edit


TABLE = torch.arange(64 * 32).view(64, 32) / 1000
WIDE = torch.cat([TABLE, TABLE], dim=1)
EQUAL_TABLES = {
    "embedding alone": {"embedding": TABLE},
    "head alone": {"head": TABLE},
    "one storage": {"embedding": TABLE, "head": TABLE},
    "two copies": {"embedding": TABLE, "head": TABLE.clone()},
    "two dtypes": {"embedding": TABLE.bfloat16(), "head": TABLE.bfloat16().float()},
    "a view": {"embedding": TABLE, "head": WIDE[:, 32:]},
    "turned": {"embedding": TABLE.T.contiguous().T, "head": TABLE},
    "not a number": {"embedding": TABLE / 0, "head": (TABLE / 0).double()},
}
UNEQUAL_TABLES = {
    "two copies": {"embedding": TABLE, "head": TABLE + 1},
    "last value": {"embedding": TABLE, "head": torch.where(TABLE.max() == TABLE, 0, TABLE)},
}
UNEQUAL_VIEWS = {
    "two dtypes": {"embedding": TABLE.bfloat16(), "head": TABLE},
    "a view": {"embedding": TABLE, "head": WIDE[:, 16:48]},
    "turned": {"embedding": TABLE.T.contiguous().T + 1, "head": TABLE},
}


@pytest.mark.parametrize("tables", EQUAL_TABLES.values(), ids=EQUAL_TABLES)
def test_tied_tables_that_agree(tables: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    assert problems(path, with_tables(**tables), TIED) == []
    assert [p.kind for p in inspect_checkpoint(path, deep=True).problems if p.kind != "non_finite"] == []
    model, metadata = load_checkpoint_model(path)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert torch.equal(model.embed_tokens.weight.nan_to_num(), next(iter(tables.values())).float().nan_to_num())
    result = inspect_checkpoint(path)
    assert metadata.parameters == result.parameters.total == 54364
    assert sum(use.parameters for use in result.dtypes) == 54364
    assert result.parameters.parts.head == 0


@pytest.mark.parametrize("tables", UNEQUAL_TABLES.values(), ids=UNEQUAL_TABLES)
def test_tied_tables_that_differ(tables: dict[str, torch.Tensor], tmp_path: Path) -> None:
    ((kind, name, message),) = problems(tmp_path / "a.pt", with_tables(**tables), TIED)
    assert (kind, name) == ("tie", HEAD)
    assert "tie_word_embeddings is true" in message


@pytest.mark.parametrize("tables", UNEQUAL_VIEWS.values(), ids=UNEQUAL_VIEWS)
def test_tied_tables_whose_checksums_cannot_tell(tables: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Inspection needs --deep for these; the loader always compares."""
    path = tmp_path / "a.pt"
    mk(path, TIED, with_tables(**tables))
    assert inspect_checkpoint(path).problems == []
    assert [problem.kind for problem in inspect_checkpoint(path, deep=True).problems] == ["tie"]
    with pytest.raises(CheckpointError, match="tie_word_embeddings is true"):
        load_checkpoint_model(path)


def test_tied_tables_of_a_file_without_checksums(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        mk(tmp_path / "a.pt", TIED, with_tables(embedding=TABLE, head=TABLE + 1))
        mk(tmp_path / "b.pt", TIED, with_tables(embedding=TABLE, head=TABLE.clone()))
    finally:
        torch.serialization.set_crc32_options(True)
    with pytest.raises(CheckpointError, match="tie_word_embeddings is true"):
        load_checkpoint_model(tmp_path / "a.pt")
    load_checkpoint_model(tmp_path / "b.pt")
    assert inspect_checkpoint(tmp_path / "b.pt", deep=True).records_verified == 0


def test_tied_head_of_the_wrong_shape(tmp_path: Path) -> None:
    ((kind, name, _),) = problems(tmp_path / "a.pt", with_tables(embedding=TABLE, head=TABLE[:5]), TIED)
    assert (kind, name) == ("shape", HEAD)


def test_tied_tables_that_are_both_missing(tmp_path: Path) -> None:
    ((kind, name, _),) = problems(tmp_path / "a.pt", with_tables(), TIED)
    assert (kind, name) == ("missing", EMBEDDING)


def test_untied_head_that_is_missing(tmp_path: Path) -> None:
    ((kind, name, _),) = problems(tmp_path / "a.pt", lambda made: made["model"].pop(HEAD))
    assert (kind, name) == ("missing", HEAD)
