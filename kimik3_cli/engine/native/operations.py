"""The compiled operations on tensors, all float32 on the CPU; PyTorch's own versions stand beside the callers.

What stays the same from token to token is noted once, and kept alive. Rows may lie apart where it says so; everything
else is contiguous.

Letters: B sequences, N rows, D hidden size, I inner width, E experts, k chosen, H heads, K KDA head size, J nope and R
shared slice of an MLA query, C latent width, V MLA value size, L tokens so far, c convolution kernel.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kimik3_cli.engine.native.library import computes, loaded


def runs_compiled(*tensors: Tensor) -> bool:
    """Say whether the compiled operations compute with these tensors here; they know no gradients."""
    return not torch.is_grad_enabled() and all(computes(tensor) for tensor in tensors)


def by_rows(x: Tensor) -> Tensor:
    """[...,X] -> [N,X], the numbers of a row side by side."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def rms_norm(x: Tensor, weight: Tensor | None, scale: float, floor: float, out: Tensor) -> None:
    """x / hypot(|x|, floor) * scale * weight [D]: x and out [N,D], rows apart; out may be x; no weight counts as 1."""
    weight_at = None if weight is None else weight.data_ptr()
    loaded().rms_norm(*x.shape, x.data_ptr(), x.stride(0), weight_at, scale, floor, out.data_ptr(), out.stride(0))


def mixed_norm(
    sources: Sequence[Tensor],
    query: Tensor,
    mix_floor: float,
    weight: Tensor,
    scale: float,
    floor: float,
    out: Tensor,
) -> None:
    """`rms_norm` of the mix of sources [N,D] by the softmax of source / hypot(|source|, mix_floor) . query."""
    at = addresses(sources)
    query_at, weight_at, out_at = query.data_ptr(), weight.data_ptr(), out.data_ptr()
    loaded().mixed_norm(len(sources), *out.shape, at, query_at, mix_floor, weight_at, scale, floor, out_at)


def short_conv(x: Tensor, taps: Tensor, tail: Tensor, out: Tensor) -> None:
    """Compute the output of `short_conv` of the KDA layer: x, out [B,T,X], taps [c,X], tail [B,c-1,X], rows apart."""
    at = x.data_ptr(), taps.data_ptr(), tail.data_ptr()
    loaded().short_conv(*x.shape, len(taps), *at, tail.stride(1), out.data_ptr())


def log_decay(z: Tensor, bias: Tensor, rate: Tensor, lower_bound: float | None, out: Tensor) -> None:
    """Compute `log_decay` of z + bias: z, out [N,H,K], bias [H*K], rate [H,1]."""
    at = z.data_ptr(), bias.data_ptr(), rate.data_ptr()
    loaded().log_decay(*z.shape, *at, lower_bound is not None, lower_bound or 0.0, out.data_ptr())


def addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """Return where tensors lie, as C takes it."""
    return (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])


@dataclass(frozen=True)
class Caps:
    """The gated activation: SiTU with a cap of the gate and one of `up` (0 leaves it as it is); a cap of 0 is SiLU."""

    gate: float = 0.0
    up: float = 0.0


def gated(gate: Tensor, up: Tensor, caps: Caps, out: Tensor) -> None:
    """act(gate, up): gate, up and out [N,I], rows of the first two apart."""
    at = gate.data_ptr(), gate.stride(0), up.data_ptr(), up.stride(0)
    loaded().gated(*out.shape, *at, caps.gate, caps.up, out.data_ptr())


class Products:
    """Products of one vector with some weights [Y_i,X], side by side in out [1,sum Y_i], in all threads."""

    def __init__(self, weights: Sequence[Tensor], out: Tensor) -> None:
        """Note where they are."""
        self.kept = weights, out
        rows = (ctypes.c_int64 * len(weights))(*[len(weight) for weight in weights])
        self.before, self.after = (len(weights), weights[0].shape[1]), (addresses(weights), rows)
        self.out_at = out.data_ptr()

    def __call__(self, x: Tensor, total: Tensor | None = None) -> None:
        """Write the products of x [1,X], added to total [1,sum Y_i]."""
        total_at = None if total is None else total.data_ptr()
        loaded().products(*self.before, x.data_ptr(), *self.after, total_at, self.out_at)


@dataclass(frozen=True)
class Routing:
    """How experts are chosen: see `Router`; bias [E]."""

    chosen: int
    groups: int
    kept_groups: int
    softmax: bool
    renormalise: bool
    factor: float
    bias: Tensor


class RoutedExperts:
    """The experts that logits choose, w2 act(w1 x, w3 x), weighted, summed and added to a total, for one token."""

    def __init__(
        self, experts: Sequence[tuple[Tensor, Tensor, Tensor]], routing: Routing, caps: Caps, out: Tensor
    ) -> None:
        """Note the weights w1 [I,D], w3 [I,D] and w2 [D,I] of every expert, and out [1,D]."""
        width, size = experts[0][0].shape
        work = torch.empty(3, routing.chosen, width)
        self.kept = experts, routing, out, work
        w1, w3, w2 = (addresses(each) for each in zip(*experts, strict=True))
        self.compute = partial(
            loaded().routed_experts,
            len(experts),
            routing.chosen,
            routing.groups,
            routing.kept_groups,
            routing.softmax,
            routing.renormalise,
            routing.factor,
            routing.bias.data_ptr(),
            size,
            width,
            w1,
            w3,
            w2,
            caps.gate,
            caps.up,
            *[each.data_ptr() for each in work],
            out.data_ptr(),
        )

    def __call__(self, logits: Tensor, x: Tensor, total: Tensor) -> None:
        """Write total [1,D] plus the experts' share of x [1,D] to out; logits [1,E]."""
        self.compute(logits.data_ptr(), x.data_ptr(), total.data_ptr())


def kda_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, chunk_size: int, out: Tensor
) -> None:
    """Compute `kda_chunkwise` of contiguous q, k, g [B,T,H,K], v [B,T,H,V] and beta [B,T,H] to out [B,T,H,V].

    state [B,H,K,V] is advanced.
    """
    batch, time, heads, keys = k.shape
    work = torch.empty(loaded().kda_chunks_work(batch, heads, keys, v.shape[-1], chunk_size))
    at = [x.data_ptr() for x in (q, k, v, g, beta, state, work, out)]
    loaded().kda_chunks(batch, time, heads, keys, v.shape[-1], chunk_size, *at)


def kda_token(
    qkv: Tensor,
    z: Tensor,
    beta: Tensor,
    gate: Tensor,
    taps: Tensor,
    rate: Tensor,
    lower_bound: float | None,
    out_weight: Tensor,
    out_floor: float,
    tail: Tensor,
    memory: Tensor,
) -> None:
    """Compute what `kda_decode` computes, with its arguments; rate [H]; z becomes the result; rows of others apart."""
    loaded().kda_token(
        *z.shape,
        len(taps),
        qkv.data_ptr(),
        qkv.stride(0),
        z.data_ptr(),
        beta.data_ptr(),
        beta.stride(0),
        gate.data_ptr(),
        gate.stride(0),
        taps.data_ptr(),
        rate.data_ptr(),
        lower_bound is not None,
        lower_bound or 0.0,
        out_weight.data_ptr(),
        out_floor,
        tail.data_ptr(),
        memory.data_ptr(),
    )


class LatentAttention:
    """Attention of one token to the latents of all, kv_b_proj absorbed into query and output, to `out` [B,H*V]."""

    def __init__(self, q: Tensor, expand: Tensor, gate: Tensor | None, nope: int, scale: float) -> None:
        """Note where q [B,H,J+R] and gate [B,H*V], rows apart, and expand [H,J+V,C] are."""
        (batch, heads, query_size), (_, rows, latent) = q.shape, expand.shape
        value, width, pieces = rows - nope, latent + query_size - nope, torch.get_num_threads()
        self.out = torch.empty(batch, heads * value)
        work = torch.empty(batch * heads * width), torch.empty(batch * pieces * heads * (latent + 2))
        self.kept = q, expand, gate, work
        self.compute = partial(
            loaded().mla_token,
            batch,
            heads,
            nope,
            query_size - nope,
            latent,
            value,
            scale,
            q.data_ptr(),
            q.stride(0),
            expand.data_ptr(),
            None if gate is None else gate.data_ptr(),
            0 if gate is None else gate.stride(0),
            pieces,
            *[each.data_ptr() for each in work],
            self.out.data_ptr(),
        )

    def __call__(self, rows: Tensor) -> None:
        """Attend to rows [B,L,C+R], a token's numbers and a sequence's tokens side by side."""
        self.compute(rows.data_ptr(), rows.stride(0), rows.shape[1])
