"""A KDA layer: projections, short convolutions, gates, delta rule, gated output.

Letters: B batch, T time, D hidden size, H heads, K head size (keys and values alike), c convolution kernel.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kimik3_cli.engine.cache import KdaState
from kimik3_cli.engine.config import KimiK3Config
from kimik3_cli.engine.kda.chunkwise import kda_chunkwise
from kimik3_cli.engine.kda.gates import l2_normalise, log_decay
from kimik3_cli.engine.kda.recurrent import kda_step
from kimik3_cli.engine.model.parts import RMSNorm, linear, linear_fp32, without_autocast


class ShortConv(nn.Module):
    """Causal depthwise convolution over time followed by SiLU; the last tap multiplies the newest input."""

    def __init__(self, channels: int, kernel: int) -> None:
        """Create the taps, [channels,1,kernel]."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, 1, kernel))

    def forward(self, x: Tensor, tail: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Convolve [B,T,channels].

        Args:
            x: the new inputs.
            tail: [B,kernel-1,channels], the inputs before them; None means zeros.

        Returns:
            output [B,T,channels] and the last kernel-1 inputs.
        """
        taps = self.weight.squeeze(1).to(x.dtype).unbind(-1)  # kernel times [channels]
        if tail is None:
            tail = x.new_zeros(x.shape[0], len(taps) - 1, x.shape[2])
        padded = torch.cat([tail.to(x.dtype), x], dim=1)  # [B,kernel-1+T,channels]
        time = x.shape[1]
        total = padded[:, :time] * taps[0]
        for shift, tap in enumerate(taps[1:], start=1):
            total = torch.addcmul(total, padded[:, shift : shift + time], tap)
        return F.silu(total), padded[:, time:]


class KdaAttention(nn.Module):
    """Kimi Delta Attention (Kimi Linear, arXiv 2510.26692), both gate forms and both output-gate forms."""

    def __init__(self, config: KimiK3Config) -> None:
        """Create the parameters under the checkpoint's names."""
        super().__init__()
        linear_attn, hidden = config.linear_attn_config, config.hidden_size
        self.heads, self.head_dim = linear_attn.num_heads, linear_attn.head_dim
        self.gate_lower_bound = linear_attn.gate_lower_bound
        self.chunk_size = config.kda_chunk_size
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
        q, k, v = self._convolved(x, state)
        q, k = l2_normalise(q) * self.head_dim**-0.5, l2_normalise(k)  # [B,T,H,K] float32
        z = self._heads(self.f_b_proj(self.f_a_proj(x)).float() + self.dt_bias)
        g = log_decay(z, self.A_log, self.gate_lower_bound)  # [B,T,H,K] float32
        beta = torch.sigmoid(linear_fp32(x, self.b_proj.weight))  # [B,T,H] float32
        with without_autocast(x.device):
            o = self._delta_rule(q, k, v.float(), g, beta, state)  # [B,T,H,K] float32
        gate = self._heads(self.g_proj(x) if self.full_rank_gate else self.g_b_proj(self.g_a_proj(x)))
        y: Tensor = self.o_proj((self.o_norm(o) * torch.sigmoid(gate.float())).flatten(-2))
        return y

    def _heads(self, x: Tensor) -> Tensor:
        """[B,T,H*K] -> [B,T,H,K]."""
        return x.view(*x.shape[:-1], self.heads, self.head_dim)

    def _convolved(self, x: Tensor, state: KdaState | None) -> tuple[Tensor, Tensor, Tensor]:
        tails = (None, None, None) if state is None else state.tail.chunk(3, dim=-1)
        parts = ((self.q_proj, self.q_conv1d), (self.k_proj, self.k_conv1d), (self.v_proj, self.v_conv1d))
        outputs, new_tails = zip(
            *(conv(proj(x), tail) for (proj, conv), tail in zip(parts, tails, strict=True)), strict=True
        )
        if state is not None:
            state.tail = torch.cat(new_tails, dim=-1)
        q, k, v = (self._heads(output) for output in outputs)
        return q, k, v

    def _delta_rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: KdaState | None) -> Tensor:
        if state is None:
            return kda_chunkwise(q, k, v, g, beta, chunk_size=self.chunk_size)[0]
        if q.shape[1] == 1:
            o, state.memory = kda_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state.memory)
            return o.unsqueeze(1)
        o, state.memory = kda_chunkwise(q, k, v, g, beta, state.memory, chunk_size=self.chunk_size)
        return o
