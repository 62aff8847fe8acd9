"""Next-token logits and the one generation loop.

Letters: T prompt length, V vocabulary.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kimik3_cli.engine.device import inference_autocast
from kimik3_cli.engine.limits import check_generation, check_prompt, eos_ids, padded_length
from kimik3_cli.engine.model.decoder import KimiK3
from kimik3_cli.engine.sampling import select_token
from kimik3_cli.errors import NonFiniteError
from kimik3_cli.requests import check_sampling


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
    device = model.embed_tokens.weight.device
    filled = ids + [pad] * (padded_length(config, len(ids)) - len(ids))
    with torch.inference_mode(), inference_autocast(device, precision):
        hidden = model.hidden(torch.tensor([filled], device=device))  # [1,T,D]
        logits: Tensor = model.lm_head(hidden[0, len(ids) - 1]).float()  # [V]
    if not bool(torch.isfinite(logits).all()):
        raise NonFiniteError(
            f"non-finite logits after {len(ids)} tokens; the checkpoint's weights may be damaged, "
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
) -> Iterator[tuple[int, str | None]]:
    """Generate tokens one by one.

    Args:
        eos_id: id or ids that end the text; None takes the configuration's, else 0.
        Others: see `select_token` and `next_token_logits`.

    Yields:
        (token id, finish reason); the reason is None but for the last: "eos" or "length".

    Raises:
        RequestError: (a ValueError) before anything is computed.
        NonFiniteError: naming the step.
    """
    ids, pad = check_generation(model.config, prompt_ids, max_new_tokens, pad_id)
    check_sampling(mode, temperature, top_k, top_p, seed)
    ends = eos_ids(model.config, eos_id)
    generator = torch.Generator().manual_seed(seed) if mode == "sample" else None
    for step in range(1, max_new_tokens + 1):
        try:
            logits = next_token_logits(model, ids, pad_id=pad, precision=precision)
        except NonFiniteError as error:
            raise NonFiniteError(f"step {step} of generation: {error}") from None
        token = select_token(logits, mode, temperature, top_k, top_p, generator)
        ids.append(token)
        reason = "eos" if token in ends else "length" if step == max_new_tokens else None
        yield token, reason
        if reason:
            return


def generate_tokens(
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
) -> list[int]:
    """Return the new token ids of `stream_tokens`, an EOS that ended the text included."""
    steps = stream_tokens(
        model,
        prompt_ids,
        max_new_tokens=max_new_tokens,
        mode=mode,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        eos_id=eos_id,
        pad_id=pad_id,
        precision=precision,
    )
    return [token for token, _ in steps]
