"""Which KDA paths can run where, and the functions of each: `chunkwise` in PyTorch, `fused` in Triton."""

import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from kimik3_cli.engine.kda.chunkwise import kda_chunkwise
from kimik3_cli.engine.kda.decode import KdaConstants, kda_decode, kda_decode_native
from kimik3_cli.engine.kda.fused.launch import LARGEST_HEAD, SMALLEST_HEAD
from kimik3_cli.engine.kda.gates import biased_log_decay, decay_rate, l2_normalise
from kimik3_cli.engine.native import operations as compiled
from kimik3_cli.engine.native.library import computes

Backend = Literal["chunkwise", "fused"]
# q, k, v, z, beta_logits, a_log, dt_bias, initial_state, lower_bound, as `kda_fused` takes them
Prefill = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, float | None], tuple[Tensor, Tensor]
]
Decode = Callable[[Tensor, Tensor, Tensor, Tensor, KdaConstants, Tensor, Tensor], Tensor]
OLDEST_CAPABILITY = (8, 0)


def why_not_fused(device: torch.device, head_dim: int | None = None) -> str | None:
    """Return the first condition that the fused path lacks; None when it can run.

    Args:
        device: where the model will run.
        head_dim: of the model's KDA heads; None while the model is not known yet.
    """
    if device.type != "cuda":
        return f"the fused path needs a CUDA device and the device is {str(device)!r}"
    if find_spec("triton") is None:
        return "the fused path needs the package triton, which is not installed (pip install triton)"
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        return "the fused path needs compiled kernels and TRITON_INTERPRET is set, which is for tests (unset it)"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        needed, has = (".".join(map(str, each)) for each in (OLDEST_CAPABILITY, capability))
        return f"the fused path needs compute capability {needed} and {torch.cuda.get_device_name(device)} has {has}"
    if head_dim is not None and not SMALLEST_HEAD <= head_dim <= LARGEST_HEAD:
        return f"the fused path needs a head_dim from {SMALLEST_HEAD} to {LARGEST_HEAD} and the model's is {head_dim}"
    return None


def prefill_function(backend: Backend, chunk_size: int) -> Prefill:
    """Return the delta rule over many tokens, from raw gates; `chunk_size` is that of the chunkwise path."""
    if backend == "fused":
        from kimik3_cli.engine.kda.fused.prefill import kda_fused

        return kda_fused
    return partial(_prefill_chunkwise, chunk_size)


def decode_function(backend: Backend, weight: Tensor) -> Decode:
    """Return the step of one token, in place, for a model with weights like this one."""
    if backend == "fused":
        from kimik3_cli.engine.kda.fused.decode import kda_decode_fused

        return kda_decode_fused
    return kda_decode_native if computes(weight) else kda_decode


def _prefill_chunkwise(
    chunk_size: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta_logits: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor | None,
    lower_bound: float | None,
) -> tuple[Tensor, Tensor]:
    """Compute what `kda_fused` computes, with `kda_chunkwise` or its compiled twin; q, k and v are float32."""
    q, k = l2_normalise(q, k.shape[-1] ** -0.5), l2_normalise(k)
    g = biased_log_decay(z, dt_bias, decay_rate(a_log, lower_bound), lower_bound)
    beta = torch.sigmoid(beta_logits)
    if not compiled.runs_compiled(q, k, v, g, beta):
        return kda_chunkwise(q, k, v, g, beta, initial_state, chunk_size=chunk_size)
    batch, _, heads, size = k.shape
    state = torch.zeros(batch, heads, size, size) if initial_state is None else initial_state.clone()
    o = torch.empty(v.shape)
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    compiled.kda_chunks(q, k, v, g, beta, state, chunk_size, o)
    return o, state
