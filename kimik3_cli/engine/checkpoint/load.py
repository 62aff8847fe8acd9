"""Loads a checkpoint into a model: map the file, check everything, build on the meta device, assign, tie."""

import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kimik3_cli.engine.checkpoint.archive import printable_path
from kimik3_cli.engine.checkpoint.contents import (
    FORMAT_VERSION,
    Contents,
    canonical_names,
    read_contents,
    real_values,
    tie_problem,
)
from kimik3_cli.engine.checkpoint.reading import equal_values, read_as
from kimik3_cli.engine.checkpoint.stored import printable
from kimik3_cli.engine.checkpoint.tensors import EMBEDDING, HEAD
from kimik3_cli.engine.device import check_precision, resolve_backend, resolve_device
from kimik3_cli.engine.model.decoder import KimiK3
from kimik3_cli.errors import CheckpointError
from kimik3_cli.results import Problem

LISTED_PROBLEMS = 20
# Matrices whose products the model computes in float32 whatever the precision: router, beta, residual mixing.
FLOAT32_MATRICES = (".block_sparse_moe.gate.weight", ".self_attn.b_proj.weight", "_res_proj.weight")


@dataclass(frozen=True, slots=True)
class CheckpointMetadata:
    """What a loaded checkpoint says of itself, and which KDA backend runs it."""

    path: str
    format_version: int
    step: int | None
    training_kda_backend: str
    inference_kda_backend: str
    parameters: int
    vocab_size: int
    max_seq_len: int
    tokenizer: dict[str, str | None] | None
    stripped_prefix: str


def load_checkpoint_model(
    checkpoint_path: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    backend: Literal["chunkwise", "fused"] = "chunkwise",
    *,
    precision: Literal["fp32", "bf16"] = "fp32",
) -> tuple[KimiK3, CheckpointMetadata]:
    """Load a checkpoint of format version 7 for inference: in eval mode on the device, without gradients.

    In fp32 every parameter is float32 whatever was stored; a float32 tensor on the CPU stays a view of the mapped file.
    The trainer state is never touched.

    Args:
        checkpoint_path: the file.
        device: where the model will run: auto, cpu, cuda or cuda:N.
        backend: the KDA backend of inference, whatever the model was trained with.
        precision: see `parameter_dtype`.

    Raises:
        RequestError, DeviceError: (ValueErrors) device, backend or precision is unknown or not available here; told
            before the file is read. Or the backend cannot run this model's head size.
        CheckpointError: (a ValueError) the file is unreadable, or its tensors are not those of its configuration, all
            of which are named.
        ConfigError: (a CheckpointError) the configuration is wrong.
    """
    target = resolve_device(str(device))
    check_precision(target, precision)
    resolve_backend(backend, target)
    contents = read_contents(checkpoint_path)
    resolve_backend(backend, target, contents.config.linear_attn_config.head_dim)
    _refuse_problems(contents)
    with torch.device("meta"), _SkipInitialisation():
        model = KimiK3(contents.config.with_backend(backend))
    model.load_state_dict(_parameters(contents, target, precision), strict=True, assign=True)
    model.tie_head()
    _refuse_unset(model)
    return model.requires_grad_(False).eval(), _metadata(contents, model, backend)


def parameter_dtype(name: str, shape: tuple[int, ...], precision: str) -> torch.dtype:
    """Return the dtype of a loaded parameter.

    fp32: float32. bf16: bfloat16 for matrices (projections, experts, embedding, head); float32 for everything else
    (norms, `A_log`, `dt_bias`, `e_score_correction_bias`, convolution taps) and for `FLOAT32_MATRICES`.
    """
    keeps_float32 = precision == "fp32" or len(shape) != 2 or name.endswith(FLOAT32_MATRICES)
    return torch.float32 if keeps_float32 else torch.bfloat16


class _SkipInitialisation(TorchFunctionMode):
    """Leaves new parameters unset: they have no numbers yet, and `normal_` on meta imports sympy for a second."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return None
        return func(*args, **(kwargs or {}))


def _refuse_problems(contents: Contents) -> None:
    problems: list[Problem] = list(contents.problems)
    if not problems and contents.undecided_tie and not equal_values(contents.archive, *contents.undecided_tie):
        problems.append(tie_problem())
    if not problems:
        return
    listed = "; ".join(problem.message for problem in problems[:LISTED_PROBLEMS])
    left = len(problems) - LISTED_PROBLEMS
    more = f"; and {left} more, which kimik3 inspect-checkpoint lists" if left > 0 else ""
    raise CheckpointError(f"{contents.archive.name} does not fit its configuration: {listed}{more}")


def _parameters(contents: Contents, device: torch.device, precision: str) -> dict[str, Tensor]:
    """Return every parameter by name, one tensor at a time: as it lies in the mapped file where that will do."""
    mapped = _mapped_tensors(contents)
    parameters = {}
    for name, spec in contents.specs.items():
        stored = contents.tensors[name]
        ref = real_values(spec, stored)
        dtype = parameter_dtype(name, spec.shape, precision)
        as_it_lies = ref is stored and ref.is_contiguous and getattr(torch, ref.dtype) == dtype
        tensor = mapped[name].detach() if as_it_lies else read_as(contents.archive, ref, dtype)
        parameters[name] = tensor.to(device)
    if contents.config.tie_word_embeddings:
        parameters[HEAD] = parameters[EMBEDDING]
    return parameters


def _mapped_tensors(contents: Contents) -> Mapping[str, Tensor]:
    """Map the file; nothing of it is read until a tensor is used."""
    path = contents.archive.path
    try:
        loaded: dict[str, Any] = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, ValueError, LookupError, TypeError, OSError) as error:
        # Torch's advice on pickles, to switch safety off, is not ours.
        reason = str(error).split(". ")[0] if isinstance(error, RuntimeError) else type(error).__name__
        message = f"{contents.archive.name} cannot be mapped by torch ({printable(reason)}); copy it or save it again"
        raise CheckpointError(message) from error
    if not contents.archive.is_unchanged():
        raise CheckpointError(f"{contents.archive.name} was replaced while it was read; load it again")
    return canonical_names(contents.config, loaded["model"])


def _refuse_unset(model: KimiK3) -> None:
    unset = [name for name, tensor in chain(model.named_parameters(), model.named_buffers()) if tensor.is_meta]
    if unset:
        raise CheckpointError(f"the checkpoint gives no value to {', '.join(unset)}; this is a fault of kimik3")


def _metadata(contents: Contents, model: KimiK3, backend: str) -> CheckpointMetadata:
    config, tokenizer = contents.config, contents.tokenizer
    return CheckpointMetadata(
        path=printable_path(contents.archive.path),
        format_version=FORMAT_VERSION,
        step=contents.step,
        training_kda_backend=config.kda_backend,
        inference_kda_backend=backend,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        vocab_size=config.vocab_size,
        max_seq_len=config.max_seq_len,
        tokenizer=None if tokenizer is None else tokenizer.model_dump(),
        stripped_prefix=contents.prefix,
    )
