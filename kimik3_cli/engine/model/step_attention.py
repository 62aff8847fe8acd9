"""The two attention layers for one token of every sequence.

Letters: B sequences, L tokens so far, D hidden size, H heads, K KDA head size, N nope and R rope slice of an MLA query,
C latent width, V MLA value size.
"""

import math

import torch
from torch import Tensor

from kimik3_cli.engine.cache import KdaState, MlaState
from kimik3_cli.engine.kda.decode import KdaConstants
from kimik3_cli.engine.kda.dispatch import decode_function
from kimik3_cli.engine.model.kda import KdaAttention
from kimik3_cli.engine.model.mla import MlaAttention
from kimik3_cli.engine.model.step_parts import NormStep, accumulate, project


class KdaStep:
    """What `KdaAttention` computes for one token."""

    def __init__(self, layer: KdaAttention) -> None:
        """Prepare the weights, [in,out]."""
        self.qkv = [proj.weight.t() for proj in (layer.q_proj, layer.k_proj, layer.v_proj)]
        self.f_a, self.f_b, self.dt_bias = layer.f_a_proj.weight.t(), layer.f_b_proj.weight.t(), layer.dt_bias
        self.b = layer.b_proj.weight.float().t()
        gates = (layer.g_proj,) if layer.full_rank_gate else (layer.g_a_proj, layer.g_b_proj)
        self.gate = [proj.weight.t() for proj in gates]
        self.o = layer.o_proj.weight.t()
        self.heads = (layer.heads, layer.head_dim)
        self.decode = decode_function(layer.backend)
        self.constants = KdaConstants(
            taps=layer.taps().contiguous(),
            a_log=layer.A_log,
            lower_bound=layer.gate_lower_bound,
            out_weight=layer.o_norm.weight * math.sqrt(layer.head_dim),
            out_floor=torch.tensor(layer.head_dim * math.sqrt(layer.o_norm.eps)),
        )

    def __call__(self, x: Tensor, state: KdaState, total: Tensor | None) -> Tensor:
        """Normed x [B,D] -> total [B,D] plus the layer's output; the state is advanced."""
        qkv = torch.cat([project(x, weight) for weight in self.qkv], dim=-1)  # [B,3*H*K]
        z = accumulate(self.dt_bias, project(x, self.f_a), self.f_b).view(-1, *self.heads)  # [B,H,K]
        gate = x
        for weight in self.gate:
            gate = project(gate, weight)
        beta = project(x, self.b)  # [B,H]
        y = self.decode(qkv, z, beta, gate.view_as(z), self.constants, state.tail, state.memory)
        return add_output(total, y.view(len(x), -1), self.o)


class MlaStep:
    """What `MlaAttention` computes for one token, on the latents: kv_b_proj is absorbed into query and output."""

    def __init__(self, layer: MlaAttention) -> None:
        """Prepare the weights, [in,out]."""
        low_rank = layer.low_rank_query
        self.q_a = (layer.q_a_proj.weight.t(), NormStep(layer.q_a_layernorm)) if low_rank else None
        self.q = (layer.q_b_proj if low_rank else layer.q_proj).weight.t()
        self.kv_a, self.kv_norm = layer.kv_a_proj_with_mqa.weight.t(), NormStep(layer.kv_a_layernorm)
        expand = layer.kv_b_proj.weight.float().view(layer.heads, -1, layer.latent_dim)  # [H,N+V,C]
        self.to_key = expand[:, : layer.nope_dim]  # [H,N,C]
        self.to_value = expand[:, layer.nope_dim :].transpose(1, 2)  # [H,C,V]
        self.gate = layer.g_proj.weight.t() if layer.gated else None
        self.o = layer.o_proj.weight.t()
        self.heads, self.latent_dim, self.nope_dim, self.scale = (
            layer.heads,
            layer.latent_dim,
            layer.nope_dim,
            layer.scale,
        )

    def __call__(self, x: Tensor, state: MlaState, total: Tensor | None) -> Tensor:
        """Normed x [B,D] -> total [B,D] plus the layer's output; the state is extended."""
        query = x if self.q_a is None else self.q_a[1](project(x, self.q_a[0]))
        q = project(query, self.q).view(len(x), self.heads, -1)  # [B,H,N+R]
        compressed = project(x, self.kv_a)  # [B,C+R]
        latent, shared_key = compressed[:, : self.latent_dim], compressed[:, self.latent_dim :]
        rows = state.append(torch.cat([self.kv_norm(latent), shared_key], dim=-1).unsqueeze(1))  # [B,L,C+R]
        q_latent = torch.bmm(q[..., : self.nope_dim].transpose(0, 1), self.to_key).transpose(0, 1)  # [B,H,C]
        queries = torch.cat([q_latent, q[..., self.nope_dim :]], dim=-1)  # [B,H,C+R]
        weights = torch.softmax(torch.bmm(queries, rows.transpose(1, 2)) * self.scale, dim=-1)  # [B,H,L]
        attended = torch.bmm(weights, rows[..., : self.latent_dim])  # [B,H,C]
        o = torch.bmm(attended.transpose(0, 1), self.to_value).transpose(0, 1).reshape(len(x), -1)  # [B,H*V]
        if self.gate is not None:
            o = o * torch.sigmoid(project(x, self.gate))
        return add_output(total, o, self.o)


def add_output(total: Tensor | None, y: Tensor, weight: Tensor) -> Tensor:
    """Project y with weight [in,D] and add it to total [B,D]; None starts a new sum."""
    return project(y, weight) if total is None else accumulate(total, y, weight)
