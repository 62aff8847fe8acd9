"""Writes a checkpoint of format version 7, so that any trainer can use it."""

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kimik3_cli.engine.checkpoint.contents import FORMAT_KEYS, FORMAT_VERSION, read_contents
from kimik3_cli.engine.checkpoint.files import printable_path
from kimik3_cli.engine.checkpoint.load import refuse_problems
from kimik3_cli.engine.checkpoint.tensors import HEAD
from kimik3_cli.engine.model.decoder import KimiK3
from kimik3_cli.engine.replacing import replacing, sync
from kimik3_cli.errors import CheckpointError


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    tokenizer: dict[str, str | None] | None = None,
    **trainer_state: Any,
) -> None:
    """Write a model and its trainer state to one file: whole, or not at all.

    The file is written under another name in the same folder, read back in structure, synced to the disk and renamed. A
    tied head is stored once, as the embedding.

    Args:
        path: the file; an existing one is replaced.
        model: a KimiK3, or one wrapped for data parallelism or compiled; its configuration is stored with it.
        tokenizer: `name_or_path`, and `revision` or None.
        trainer_state: step, optimizer state and so on: tensors, plain containers, numbers, strings and None.

    Raises:
        CheckpointError: (a ValueError) the trainer state has a reserved key or an object that a checkpoint cannot
            hold, named by key and type, or the file cannot be written. An older file is left as it was.
    """
    inner = _unwrapped(model)
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise CheckpointError(f"{printable_path(path)} exists and is no regular file; give the name of a file")
    reserved = sorted(set(trainer_state) & set(FORMAT_KEYS))
    if reserved:
        raise CheckpointError(f"trainer state has the reserved key {reserved[0]!r}; give it another name")
    content = {
        "format_version": FORMAT_VERSION,
        "model_config": inner.config.to_dict(),
        "model": _weights(inner),
        **({} if tokenizer is None else {"tokenizer": tokenizer}),
        **trainer_state,
    }
    try:
        with replacing(target) as unfinished:
            with unfinished.open("wb") as file:
                torch.save(content, file)
            sync(unfinished)
            read_back(unfinished, path)
    except (OSError, RuntimeError, TypeError, AttributeError, pickle.PicklingError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{printable_path(path)} could not be written: {reason}") from error


def read_back(written: Path, path: str | os.PathLike[str]) -> None:
    """Read the structure of a checkpoint that has been written and will be moved to `path`.

    Raises:
        CheckpointError: it cannot be read as it is.
    """
    try:
        refuse_problems(read_contents(written))
    except CheckpointError as error:
        message = str(error).replace(printable_path(written), printable_path(path))
        raise CheckpointError(message) from error.__cause__


def _unwrapped(model: nn.Module) -> KimiK3:
    """Return the model inside the wrappers of data parallelism and compilation."""
    inner: object = model
    while not isinstance(inner, KimiK3):
        wrapped = getattr(inner, "module", getattr(inner, "_orig_mod", None))
        if wrapped is None:
            raise CheckpointError(f"the model is a {type(inner).__name__}; give a kimik3_cli.engine.KimiK3")
        inner = wrapped
    return inner


def _weights(model: KimiK3) -> dict[str, Tensor]:
    tied = model.config.tie_word_embeddings
    return {
        name: _alone(tensor.detach().cpu().contiguous())
        for name, tensor in model.state_dict().items()
        if not (tied and name == HEAD)
    }


def _alone(tensor: Tensor) -> Tensor:
    """Return a tensor that owns its storage, because a view would be written with all that it is a view of."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
