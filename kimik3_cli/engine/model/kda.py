"""A KDA layer: projections, short convolutions, gates, delta rule, gated output.

Letters: B batch, T time, D hidden size, H heads, K head size (keys and values alike), c convolution kernel.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kimik3_cli.engine.cache import KdaState
from kimik3_cli.engine.config import KimiK3Config
from kimik3_cli.engine.kda.dispatch import prefill_function
from kimik3_cli.engine.model.parts import RMSNorm, linear, linear_fp32, without_autocast
from kimik3_cli.engine.native import operations as compiled


class ShortConv(nn.Module):
    """The weight of a causal depthwise convolution over time; the last tap multiplies the newest input."""

    def __init__(self, channels: int, kernel: int) -> None:
        """Create the taps, [channels,1,kernel]."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, 1, kernel))


def short_conv(x: Tensor, taps: Tensor, tail: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """SiLU of the causal depthwise convolution over time.

    Args:
        x: [B,T,X], the new inputs.
        taps: [c,X], the newest input's last.
        tail: [B,c-1,X], the inputs before them; None means zeros.

    Returns:
        output [B,T,X] and the new tail.
    """
    time, kernel = x.shape[1], len(taps)
    if tail is None:
        tail = x.new_zeros(x.shape[0], kernel - 1, x.shape[2])
    if compiled.runs_compiled(x, taps, tail):
        out = torch.empty(x.shape)
        compiled.short_conv(x.contiguous(), taps.contiguous(), tail, out)
        return out, torch.cat([tail, x[:, max(0, time + 1 - kernel) :]], dim=1)[:, min(time, kernel - 1) :]
    padded = torch.cat([tail, x], dim=1)  # [B,c-1+T,X]
    total = padded[:, :time] * taps[0]
    for shift in range(1, kernel):
        total.addcmul_(padded[:, shift : shift + time], taps[shift])
    return F.silu(total, inplace=True), padded[:, time:]


class KdaAttention(nn.Module):
    """Kimi Delta Attention (Kimi Linear, arXiv 2510.26692), both gate forms and both output-gate forms."""

    def __init__(self, config: KimiK3Config) -> None:
        """Create the parameters under the checkpoint's names."""
        super().__init__()
        linear_attn, hidden = config.linear_attn_config, config.hidden_size
        self.heads, self.head_dim = linear_attn.num_heads, linear_attn.head_dim
        self.gate_lower_bound = linear_attn.gate_lower_bound
        self.backend, self.chunk_size = config.kda_backend, config.kda_chunk_size
        width = self.heads * self.head_dim
        self.q_proj, self.k_proj, self.v_proj = (linear(hidden, width) for _ in range(3))
        kernel = linear_attn.short_conv_kernel_size
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (ShortConv(width, kernel) for _ in range(3))
        self.f_a_proj, self.f_b_proj = linear(hidden, self.head_dim), linear(self.head_dim, width)
        self.b_proj = linear(hidden, self.heads)
        self.A_log = nn.Parameter(torch.zeros(self.heads))
        self.dt_bias = nn.Parameter(torch.zeros(width))
        if linear_attn.use_full_rank_gate:
            self.g_proj = linear(hidden, width)
        else:
            self.g_a_proj, self.g_b_proj = linear(hidden, self.head_dim), linear(self.head_dim, width)
        self.full_rank_gate = linear_attn.use_full_rank_gate
        self.o_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.o_proj = linear(width, hidden)

    def forward(self, x: Tensor, state: KdaState | None = None) -> Tensor:
        """[B,T,D] -> [B,T,D]; a given state is read and advanced by T tokens."""
        qkv = [projection(x).float() for projection in (self.q_proj, self.k_proj, self.v_proj)]  # [B,T,H*K] each
        z = self._heads(self.f_b_proj(self.f_a_proj(x)))  # [B,T,H,K], before dt_bias
        beta = linear_fp32(x, self.b_proj.weight)  # [B,T,H] float32, before the sigmoid
        gate = self._heads(self.g_proj(x) if self.full_rank_gate else self.g_b_proj(self.g_a_proj(x)))  # [B,T,H,K]
        with without_autocast(x.device):
            o = self._delta_rule(qkv, z, beta, state)  # [B,T,H,K] float32
        y: Tensor = self.o_proj((self.o_norm(o) * torch.sigmoid(gate.float())).flatten(-2))
        return y

    def _heads(self, x: Tensor) -> Tensor:
        """[B,T,H*K] -> [B,T,H,K]."""
        return x.view(*x.shape[:-1], self.heads, self.head_dim)

    def _delta_rule(self, qkv: list[Tensor], z: Tensor, beta: Tensor, state: KdaState | None) -> Tensor:
        tails = [None] * 3 if state is None else state.tail.chunk(3, dim=-1)
        convolved = [short_conv(*each) for each in zip(qkv, self.taps().chunk(3, dim=-1), tails, strict=True)]
        q, k, v = (self._heads(mixed) for mixed, _ in convolved)  # [B,T,H,K]
        initial = None if state is None else state.memory
        delta_rule = prefill_function(self.backend, self.chunk_size)
        o, memory = delta_rule(q, k, v, z, beta, self.A_log, self.dt_bias, initial, self.gate_lower_bound)
        if state is not None:
            # not kept as they are: views would hold on to the whole input
            torch.cat([tail for _, tail in convolved], dim=-1, out=state.tail)
            state.memory.copy_(memory)
        return o

    def taps(self) -> Tensor:
        """Weights of the three convolutions side by side, [c,3*H*K] float32, the newest input's last."""
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        return torch.cat([conv.weight.float() for conv in convs]).squeeze(1).t()
