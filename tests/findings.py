"""What is wrong with an edited checkpoint, told alike by the inspection and the loader."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import mk

from kimik3_cli.engine.checkpoint.inspection import inspect_checkpoint
from kimik3_cli.engine.checkpoint.load import load_checkpoint_model
from kimik3_cli.errors import CheckpointError

Edit = Callable[[dict[str, Any]], object]


def problems(path: Path, edit: Edit, cfg: dict[str, Any] | None = None) -> list[tuple[str, str, str]]:
    """Edit a mini checkpoint; (kind, name, message) of all its problems, which the loader must name as well."""
    mk(path, cfg, edit)
    found = inspect_checkpoint(path).problems
    if found:
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint_model(path)
        assert str(caught.value).isprintable()
        assert all(problem.message in str(caught.value) for problem in found[:20])
    else:
        load_checkpoint_model(path)
    return [(problem.kind, problem.name, problem.message) for problem in found]
