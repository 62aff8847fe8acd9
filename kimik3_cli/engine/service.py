"""One request in, one result out. Everything is checked, cheapest first, before any weight is loaded."""

import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kimik3_cli.engine.config import KimiK3Config
from kimik3_cli.engine.limits import check_generation, check_prompt, eos_ids, padded_length, shortened
from kimik3_cli.engine.replacing import replacing
from kimik3_cli.requests import GenerateRequest, LogitsRequest, ModelRequest
from kimik3_cli.results import CheckpointInfo, GenerateResult, LogitsResult, StreamPiece, TopToken

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kimik3_cli.engine.model.decoder import KimiK3
    from kimik3_cli.engine.tokenizer import Tokenizer

Update = Callable[[str], None]


def run_generate(request: GenerateRequest, update: Update = lambda text: None) -> GenerateResult:
    """Continue the request's prompt: the result that `stream_generate` ends with."""
    return next(item for item in stream_generate(request, update) if isinstance(item, GenerateResult))


def stream_generate(
    request: GenerateRequest, update: Update = lambda text: None
) -> Iterator[StreamPiece | GenerateResult]:
    """Continue the request's prompt token by token.

    Args:
        request: what to do.
        update: is told in a few words what is going on.

    Yields:
        A piece for each new token as soon as it is chosen, then the result. The pieces' texts add up to its text.

    Raises:
        RequestError, DeviceError, CheckpointError, TokenizerError: before the first piece, and nearly always before any
            weight is loaded.
        NonFiniteError: the model's logits are not finite; names the step.
    """
    job = _prepare(request, update)
    check_generation(job.config, job.prompt_ids, request.max_new_tokens, request.pad_id, not request.no_cache)
    ends = _end_ids(request, job)
    model, info = _load(request, job, update)
    stream = job.tokenizer.stream() if job.tokenizer else None
    tokens: list[int] = []
    finish: str | None = None
    for token, finish in _steps(request, job, model, ends):
        tokens.append(token)
        update(f"generating, {len(tokens)} of {request.max_new_tokens} tokens")
        if stream is None:
            yield StreamPiece(token_id=token)
        else:
            yield StreamPiece(token_id=token, text=stream.push(token) + (stream.finish() if finish else ""))
    text = {"generated_text": job.tokenizer.decode(tokens)} if job.tokenizer else {}
    yield GenerateResult(
        checkpoint=info,
        device=str(job.device),
        precision=request.precision,
        prompt_token_ids=job.prompt_ids,
        generated_token_ids=tokens,
        finish_reason="eos" if finish == "eos" else "length",
        **text,
    )


def run_logits(request: LogitsRequest, update: Update = lambda text: None) -> LogitsResult:
    """Compute the distribution of the token after the request's prompt.

    Raises:
        RequestError, DeviceError, CheckpointError, TokenizerError: nearly always before any weight is loaded.
        NonFiniteError: the logits are not finite.
        OSError: the output file cannot be written.
    """
    from kimik3_cli.engine.generation import next_token_logits

    job = _prepare(request, update)
    check_prompt(job.config, job.prompt_ids, request.pad_id)
    padded_length(job.config, len(job.prompt_ids))
    model, info = _load(request, job, update)
    logits = next_token_logits(model, job.prompt_ids, pad_id=request.pad_id, precision=request.precision).cpu()
    result = LogitsResult(
        checkpoint=info,
        device=str(job.device),
        precision=request.precision,
        prompt_token_ids=job.prompt_ids,
        vocab_size=job.config.vocab_size,
        top=_top(logits, request.top, job),
    )
    if request.output is not None:
        _write(logits, request.output)
        return result.model_copy(update={"output": str(request.output)})
    return result.model_copy(update={"logits": logits.tolist()}) if request.full else result


@dataclass(frozen=True)
class _Job:
    """A request whose every part has been found and checked; only the weights are missing."""

    device: "torch.device"
    config: KimiK3Config
    tokenizer: "Tokenizer | None"
    prompt_ids: list[int]
    checkpoint_eos: tuple[int, ...]
    allowed_ids: list[int] | None  # those of a tokenizer that lacks some of the vocabulary


def _prepare(request: ModelRequest, update: Update) -> _Job:
    """Resolve device, precision and backend; read the checkpoint's structure; then the tokenizer, then the prompt."""
    from kimik3_cli.engine.allocator import keep_freed_memory
    from kimik3_cli.engine.checkpoint.contents import read_contents
    from kimik3_cli.engine.device import check_precision, resolve_backend, resolve_device

    keep_freed_memory()
    device = resolve_device(request.device)
    check_precision(device, request.precision)
    resolve_backend(request.backend, device)
    contents = read_contents(request.checkpoint)
    backend = resolve_backend(request.backend, device, contents.config.linear_attn_config.head_dim)
    config = shortened(contents.config, request.max_seq_len).with_backend(backend)
    if request.prompt is None:
        return _Job(device, config, None, list(request.token_ids or ()), contents.eos_token_ids, None)
    from kimik3_cli.engine.tokenizer import find_tokenizer, load_tokenizer

    named = contents.tokenizer
    entry = (named.name_or_path, named.revision) if named else None
    source = find_tokenizer(request.checkpoint, entry, request.tokenizer, request.tokenizer_revision)
    update("loading the tokenizer")
    tokenizer = load_tokenizer(
        source, local_files_only=request.local_files_only, trust_remote_code=request.trust_remote_code
    )
    allowed = tokenizer.check_length(config.vocab_size, allow_padding=request.allow_vocab_padding)
    return _Job(device, config, tokenizer, tokenizer.encode(request.prompt), contents.eos_token_ids, allowed)


def _end_ids(request: GenerateRequest, job: _Job) -> list[int]:
    """Ids that end the text: --eos-id, else the tokenizer's, else the checkpoint's, else 0; an explicit 0 counts."""
    given: int | Sequence[int] | None = request.eos_id
    if given is None and job.tokenizer is not None:
        given = job.tokenizer.eos_token_id
    return sorted(eos_ids(job.config, job.checkpoint_eos or None if given is None else given))


def _steps(request: GenerateRequest, job: _Job, model: "KimiK3", ends: list[int]) -> Iterator[tuple[int, str | None]]:
    from kimik3_cli.engine.generation import stream_tokens

    return stream_tokens(
        model,
        job.prompt_ids,
        max_new_tokens=request.max_new_tokens,
        mode=request.mode,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        seed=request.seed,
        eos_id=ends,
        pad_id=request.pad_id,
        precision=request.precision,
        use_cache=not request.no_cache,
        allowed_ids=job.allowed_ids,
    )


def _load(request: ModelRequest, job: _Job, update: Update) -> "tuple[KimiK3, CheckpointInfo]":
    from kimik3_cli.engine.checkpoint.load import load_checkpoint_model

    update("loading the model")
    model, metadata = load_checkpoint_model(
        request.checkpoint,
        job.device,
        job.config.kda_backend,
        precision=request.precision,
        max_seq_len=request.max_seq_len,
    )
    update("computing")
    info = CheckpointInfo(
        path=metadata.path,
        format_version=metadata.format_version,
        step=metadata.step,
        training_kda_backend=metadata.training_kda_backend,
        inference_kda_backend=metadata.inference_kda_backend,
        parameters=metadata.parameters,
        vocab_size=metadata.vocab_size,
        max_seq_len=metadata.max_seq_len,
    )
    return model, info


def _top(logits: "Tensor", count: int, job: _Job) -> list[TopToken]:
    """Return the best `count` of [V] float32 logits, equal ones by id; only ids that the tokenizer has."""
    ids = list(range(len(logits))) if job.allowed_ids is None else job.allowed_ids
    scores = logits[ids]
    logprobs = scores.double().log_softmax(dim=-1)
    best: list[int] = scores.argsort(descending=True, stable=True)[:count].tolist()
    return [
        TopToken(
            token_id=ids[place],
            logit=scores[place].item(),
            logprob=logprobs[place].item(),
            **({"text": job.tokenizer.token_text(ids[place])} if job.tokenizer else {}),
        )
        for place in best
    ]


def _write(logits: "Tensor", path: Path) -> None:
    """Write [V] float32 logits in the format that the file's name asks for, whole or not at all."""
    import numpy
    import torch
    from safetensors.torch import save

    buffer = io.BytesIO()
    if path.suffix == ".npy":
        numpy.save(buffer, logits.numpy())
    elif path.suffix == ".safetensors":
        buffer.write(save({"logits": logits}))
    else:
        torch.save(logits, buffer)
    try:
        with replacing(Path(os.path.realpath(path))) as unfinished:
            unfinished.write_bytes(buffer.getvalue())
    except OSError as error:
        raise OSError(error.errno, f"--output could not be written ({error.strerror})", str(path)) from error
