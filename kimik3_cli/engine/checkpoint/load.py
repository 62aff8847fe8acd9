"""Loads a checkpoint into a model: map the file, check everything, build on the meta device, assign, tie."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kimik3_cli.engine.checkpoint.contents import (
    Contents,
    read_contents,
    real_values,
    tie_problem,
)
from kimik3_cli.engine.checkpoint.files import printable_path
from kimik3_cli.engine.checkpoint.reading import MappedStore, equal_values, number_dtype, read_as, read_into
from kimik3_cli.engine.checkpoint.stored import StoredTensor, TensorRef
from kimik3_cli.engine.checkpoint.tensors import EMBEDDING, HEAD
from kimik3_cli.engine.device import check_precision, resolve_backend, resolve_device, warn_if_slow
from kimik3_cli.engine.limits import shortened
from kimik3_cli.engine.memory import machine_bytes
from kimik3_cli.engine.model.decoder import KimiK3
from kimik3_cli.engine.model.layout import place
from kimik3_cli.errors import CheckpointError, TooLargeError
from kimik3_cli.results import Problem, sized

LISTED_PROBLEMS = 20
# Matrices whose products the model computes in float32 whatever the precision: router, beta, residual mixing.
FLOAT32_MATRICES = (".block_sparse_moe.gate.weight", ".self_attn.b_proj.weight", "_res_proj.weight")


@dataclass(frozen=True, slots=True)
class CheckpointMetadata:
    """What a loaded checkpoint says of itself, and which KDA backend runs it."""

    path: str
    format_version: int | None
    step: int | None
    training_kda_backend: str | None
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
    max_seq_len: int | None = None,
) -> tuple[KimiK3, CheckpointMetadata]:
    """Load a checkpoint for inference: in eval mode on the device, without gradients.

    In fp32 every parameter is float32 whatever was stored; a float32 tensor on the CPU stays a view of the mapped file.
    The trainer state is never touched.

    Args:
        checkpoint_path: a file of format version 7, or a Hugging Face directory.
        device: where the model will run: auto, cpu, cuda or cuda:N.
        backend: the KDA backend of inference, whatever the model was trained with.
        precision: see `parameter_dtype`.
        max_seq_len: a context length in tokens, shorter than the checkpoint's.

    Raises:
        RequestError, DeviceError: (ValueErrors) device, backend or precision is unknown or not available here; told
            before the file is read. Or the backend cannot run this model's head size, or max_seq_len is longer than the
            checkpoint's.
        TooLargeError: (a ValueError) the weights do not fit into memory; told before they are read.
        CheckpointError: (a ValueError) the file is unreadable, or its tensors are not those of its configuration, all
            of which are named.
        ConfigError: (a CheckpointError) the configuration is wrong.
    """
    target = resolve_device(str(device))
    check_precision(target, precision)
    resolve_backend(backend, target)
    contents = read_contents(checkpoint_path)
    resolve_backend(backend, target, contents.config.linear_attn_config.head_dim)
    config = shortened(contents.config, max_seq_len).with_backend(backend)
    refuse_problems(contents)
    _refuse_too_large(contents, target, precision)
    warn_if_slow(target)
    with torch.device("meta"), _SkipInitialisation():
        model = KimiK3(config)
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


def refuse_problems(contents: Contents) -> None:
    """Refuse a checkpoint that is not what its configuration asks for.

    Raises:
        CheckpointError: naming what is wrong.
    """
    problems: list[Problem] = list(contents.problems)
    if not problems and contents.undecided_tie and not equal_values(contents.store, *contents.undecided_tie):
        problems.append(tie_problem())
    if not problems:
        return
    listed = "; ".join(problem.message for problem in problems[:LISTED_PROBLEMS])
    left = len(problems) - LISTED_PROBLEMS
    more = f"; and {left} more, which kimik3 inspect-checkpoint lists" if left > 0 else ""
    raise CheckpointError(f"{contents.store.name} does not fit its configuration: {listed}{more}")


def _refuse_too_large(contents: Contents, device: torch.device, precision: str) -> None:
    """Refuse weights that cannot be in memory: on a CPU those that do not stay in the mapped file."""
    on_cpu = device.type == "cpu"
    memory = machine_bytes() if on_cpu else torch.cuda.get_device_properties(device).total_memory
    wanted = _wanted(contents, precision)
    needed = 0
    for name, spec in contents.specs.items():
        shape, dtype = wanted[name]
        ref = real_values(spec, contents.tensors[name])
        if not (on_cpu and _stays_mapped(ref, dtype)):
            needed += math.prod(shape) * dtype.itemsize
    if needed > memory:
        what = f"{contents.store.name} needs {sized(needed)} of memory in {precision}; {device} has {sized(memory)}"
        raise TooLargeError(f"{what}, and kimik3 inspect-checkpoint says what would hold it")


def _stays_mapped(ref: StoredTensor, dtype: torch.dtype) -> TypeGuard[TensorRef]:
    return isinstance(ref, TensorRef) and ref.is_contiguous and number_dtype(ref) == dtype


def _wanted(contents: Contents, precision: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every parameter."""
    return {name: (spec.shape, parameter_dtype(name, spec.shape, precision)) for name, spec in contents.specs.items()}


def _parameters(contents: Contents, device: torch.device, precision: str) -> dict[str, Tensor]:
    """Return every parameter by name, one tensor at a time.

    On a CPU tensors stay as they lie in the mapped file where that will do; a GPU has those side by side that decoding
    reads together.
    """
    mapped = MappedStore(contents.store)
    wanted = _wanted(contents, precision)
    parameters = {} if device.type == "cpu" else place(wanted, device)
    for name, spec in contents.specs.items():
        ref, dtype = real_values(spec, contents.tensors[name]), wanted[name][1]
        if name in parameters:
            read_into(contents.store, ref, parameters[name])
        else:
            tensor = mapped.view(ref) if _stays_mapped(ref, dtype) else read_as(contents.store, ref, dtype)
            parameters[name] = tensor.to(device)
    if contents.config.tie_word_embeddings:
        parameters[HEAD] = parameters[EMBEDDING]
    return parameters


def _refuse_unset(model: KimiK3) -> None:
    unset = [name for name, tensor in chain(model.named_parameters(), model.named_buffers()) if tensor.is_meta]
    if unset:
        raise CheckpointError(f"the checkpoint gives no value to {', '.join(unset)}; this is a fault of kimik3")


def _metadata(contents: Contents, model: KimiK3, backend: str) -> CheckpointMetadata:
    config, tokenizer = contents.config, contents.tokenizer
    return CheckpointMetadata(
        path=printable_path(contents.store.path),
        format_version=contents.format_version,
        step=contents.step,
        training_kda_backend=contents.training_kda_backend,
        inference_kda_backend=backend,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        vocab_size=config.vocab_size,
        max_seq_len=model.config.max_seq_len,
        tokenizer=None if tokenizer is None else tokenizer.model_dump(),
        stripped_prefix=contents.prefix,
    )
