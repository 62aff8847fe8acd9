"""Next-token logits and the one generation loop.

Letters: T prompt length, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from kimik3_cli.engine.cache import DecodeCache
from kimik3_cli.engine.device import inference_autocast
from kimik3_cli.engine.limits import check_generation, check_prompt, eos_ids, padded_length
from kimik3_cli.engine.model.decoder import KimiK3
from kimik3_cli.engine.model.step import DecodeStep
from kimik3_cli.engine.sampling import select_token
from kimik3_cli.errors import NonFiniteError
from kimik3_cli.requests import check_sampling

PREFILL_SEGMENT = 512  # tokens a pass over a long prompt, so that peak memory does not grow with its square


class GenerationOptions(TypedDict, total=False):
    """The keyword arguments of `stream_tokens`, which has their meaning and defaults."""

    max_new_tokens: int
    mode: str
    temperature: float
    top_k: int
    top_p: float
    seed: int
    eos_id: int | Sequence[int] | None
    pad_id: int | None
    precision: str
    use_cache: bool
    allowed_ids: Sequence[int] | None


def next_token_logits(
    model: KimiK3, token_ids: Sequence[int], *, pad_id: int | None = None, precision: str = "fp32"
) -> Tensor:
    """Logits of the token after the prompt, from one pass over the whole prompt, nothing kept.

    With the chunkwise backend the prompt is padded on the right to whole KDA chunks; the model is causal, so padding
    cannot change the logits of the last real token.

    Args:
        token_ids: T >= 1 ids.
        pad_id: None takes the configuration's.
        precision: fp32, or bf16 on CUDA.

    Returns:
        [V] float32, on the model's device.

    Raises:
        RequestError: (a ValueError) an id, the length or the pad id is wrong.
        NonFiniteError: a logit is NaN or infinite.
    """
    config = model.config
    ids, pad = check_prompt(config, token_ids, pad_id)
    filled = ids + [pad] * (padded_length(config, len(ids)) - len(ids))
    with torch.inference_mode(), inference_autocast(model.device, precision):
        hidden = model.hidden(torch.tensor([filled], device=model.device))  # [1,T,D]
        logits: Tensor = model.lm_head(hidden[0, len(ids) - 1]).float()  # [V]
    return _finite(logits, len(ids))


def advance(model: KimiK3, new_ids: Sequence[int], cache: DecodeCache, *, precision: str = "fp32") -> Tensor:
    """Feed valid token ids to a cache, long inputs in segments, and return the logits of the token after them.

    Args:
        new_ids: T >= 1 ids that follow those already in the cache.
        cache: one sequence, made for the model's configuration and device; advanced by T tokens.
        precision: fp32, or bf16 on CUDA.

    Returns:
        [V] float32, on the model's device.

    Raises:
        RequestError: (a ValueError) the ids do not fit the cache.
        NonFiniteError: a logit is NaN or infinite.
    """
    with torch.inference_mode(), inference_autocast(model.device, precision):
        ids = torch.tensor(new_ids, device=model.device)  # [T]
        if len(new_ids) == 1:
            cache.step = cache.step or DecodeStep(model)
            logits = cache.step(ids, cache)[0]  # [V]
        else:
            for segment in torch.split(ids.unsqueeze(0), PREFILL_SEGMENT, dim=1):
                hidden = model.hidden(segment, cache)[0]  # [T,D]
            logits = model.lm_head(hidden[-1]).float()  # [V]
    return _finite(logits, cache.length)


def _finite(logits: Tensor, length: int) -> Tensor:
    if not bool(torch.isfinite(logits).all()):
        raise NonFiniteError(
            f"non-finite logits after {length} tokens; the checkpoint's weights may be damaged, "
            "kimik3 inspect-checkpoint --deep lists non-finite values"
        )
    return logits


def stream_tokens(
    model: KimiK3,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int = 32,
    mode: str = "greedy",
    temperature: float = 1.0,
    top_k: int = 50,
    top_p: float = 1.0,
    seed: int = 0,
    eos_id: int | Sequence[int] | None = None,
    pad_id: int | None = None,
    precision: str = "fp32",
    use_cache: bool = True,
    allowed_ids: Sequence[int] | None = None,
) -> Iterator[tuple[int, str | None]]:
    """Generate tokens one by one.

    Args:
        eos_id: id or ids that end the text; None takes the configuration's, else 0.
        use_cache: False recomputes the whole prefix for every token, the slow check of the cached path.
        allowed_ids: the only ids that are ever chosen, at least one, in ascending order; None allows all.
        Others: see `select_token` and `next_token_logits`.

    Yields:
        (token id, finish reason); the reason is None but for the last: "eos" or "length".

    Raises:
        RequestError: (a ValueError) before anything is computed.
        NonFiniteError: naming the step.
    """
    ids, pad = check_generation(model.config, prompt_ids, max_new_tokens, pad_id, use_cache)
    check_sampling(mode, temperature, top_k, top_p, seed)
    ends = eos_ids(model.config, eos_id)
    generator = torch.Generator().manual_seed(seed) if mode == "sample" else None
    cache = DecodeCache(model.config, 1, len(ids) + max_new_tokens, model.device) if use_cache else None
    allowed = None if allowed_ids is None else torch.tensor(allowed_ids, device=model.device)
    fresh = ids  # what the cache has not seen
    for step in range(1, max_new_tokens + 1):
        try:
            if cache is None:
                logits = next_token_logits(model, ids, pad_id=pad, precision=precision)
            else:
                logits = advance(model, fresh, cache, precision=precision)
        except NonFiniteError as error:
            raise NonFiniteError(f"step {step} of generation: {error}") from None
        chosen = select_token(
            logits if allowed is None else logits[allowed], mode, temperature, top_k, top_p, generator
        )
        token = chosen if allowed_ids is None else allowed_ids[chosen]
        fresh = [token]
        ids = ids + fresh
        reason = "eos" if token in ends else "length" if step == max_new_tokens else None
        yield token, reason
        if reason:
            return


def generate_tokens(model: KimiK3, prompt_ids: Sequence[int], **options: Unpack[GenerationOptions]) -> list[int]:
    """Return the new token ids of `stream_tokens`, whose options it takes; an EOS that ended the text is included."""
    return [token for token, _ in stream_tokens(model, prompt_ids, **options)]
