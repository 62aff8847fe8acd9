"""Logits to one token id: pure, on CPU in float32, the same on every device."""

import torch
from torch import Tensor

from kimik3_cli.errors import NonFiniteError, RequestError
from kimik3_cli.requests import check_sampling


def select_token(
    logits: Tensor,
    mode: str = "greedy",
    temperature: float = 1.0,
    top_k: int = 50,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> int:
    """Choose the next token.

    greedy: the highest logit, the lowest id among equals; the sampling values are ignored. sample: logits /
    temperature; the top_k highest (ordered by logit, then by id); softmax; candidates whose preceding cumulative
    probability has reached top_p are dropped; renormalise; multinomial.

    Args:
        logits: [V], any floating dtype and device.
        generator: a CPU generator; None draws from a fresh, seed-0 one. torch's global generator is never touched.

    Raises:
        RequestError: (a ValueError) a sampling value is out of range.
        NonFiniteError: a logit is NaN or infinite.
    """
    check_sampling(mode, temperature, top_k, top_p)
    if not isinstance(logits, Tensor) or logits.ndim != 1 or not len(logits):
        shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise RequestError(f"logits are {shape}; give a tensor of one value for each token of the vocabulary")
    scores = logits.detach().to(device="cpu", dtype=torch.float32)
    if not bool(torch.isfinite(scores).all()):
        raise NonFiniteError("logits are not finite (NaN or infinite); the checkpoint's weights may be damaged")
    if mode == "greedy":
        return int((scores == scores.max()).nonzero()[0])
    candidates = _best(scores, top_k)
    # the highest score is subtracted first and the divisor kept normal, so that no temperature overflows float32
    scaled = (scores[candidates] - scores[candidates[0]]) / max(temperature, torch.finfo(torch.float32).tiny)
    probabilities = torch.softmax(scaled, dim=-1)
    excluded = (probabilities.cumsum(0) - probabilities) >= top_p
    probabilities = probabilities.masked_fill(excluded, 0.0)
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(probabilities / probabilities.sum(), 1, generator=generator)
    return int(candidates[drawn])


def _best(scores: Tensor, count: int) -> Tensor:
    """Ids of the `count` highest of [V] scores, ordered by score, then by id; more than V means all of them."""
    threshold = scores.topk(min(count, len(scores))).values[-1]
    ids = (scores >= threshold).nonzero().squeeze(-1)  # ascending; equals at the threshold are still all here
    return ids[scores[ids].argsort(descending=True, stable=True)][:count]
