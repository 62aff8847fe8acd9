"""Writes a checkpoint of format version 7, so that any trainer can use it."""

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimik3_cli.engine.checkpoint.archive import printable_path
from kimik3_cli.engine.checkpoint.contents import FORMAT_KEYS, FORMAT_VERSION, read_contents
from kimik3_cli.engine.checkpoint.tensors import HEAD
from kimik3_cli.engine.model.decoder import KimiK3
from kimik3_cli.errors import CheckpointError


def save_checkpoint(
    path: str | os.PathLike[str],
    model: KimiK3,
    *,
    tokenizer: dict[str, str | None] | None = None,
    **trainer_state: Any,
) -> None:
    """Write a model and its trainer state to one file: whole, or not at all.

    The file is written under another name in the same folder, read back in structure, synced to the disk and renamed. A
    tied head is stored once, as the embedding.

    Args:
        path: the file; an existing one is replaced.
        model: on any device; its configuration is stored with it.
        tokenizer: `name_or_path`, and `revision` or None.
        trainer_state: step, optimizer state and so on: tensors, plain containers, numbers, strings and None.

    Raises:
        CheckpointError: (a ValueError) the trainer state has a reserved key or an object that a checkpoint cannot
            hold, named by key and type, or the file cannot be written. An older file is left as it was.
    """
    target = Path(os.path.realpath(path))
    reserved = sorted(set(trainer_state) & set(FORMAT_KEYS))
    if reserved:
        raise CheckpointError(f"trainer state has the reserved key {reserved[0]!r}; give it another name")
    content = {
        "format_version": FORMAT_VERSION,
        "model_config": model.config.to_dict(),
        "model": _weights(model),
        **({} if tokenizer is None else {"tokenizer": tokenizer}),
        **trainer_state,
    }
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
    try:
        _write(content, unfinished)
        os.replace(unfinished, target)
        _sync_folder(target.parent)
    except CheckpointError as error:
        message = str(error).replace(printable_path(unfinished), printable_path(path))
        raise CheckpointError(message) from error.__cause__
    except (OSError, RuntimeError, TypeError, AttributeError, pickle.PicklingError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{printable_path(path)} could not be written: {reason}") from error
    finally:
        unfinished.unlink(missing_ok=True)


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


def _write(content: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    read_contents(path)


def _sync_folder(folder: Path) -> None:
    """Make the rename durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
