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
from kimik3_cli.engine.model.step_parts import NormStep, Projections, can_multiply, new_buffer
from kimik3_cli.engine.native.operations import LatentAttention


class KdaStep:
    """What `KdaAttention` computes for one token."""

    def __init__(self, layer: KdaAttention, batch: int) -> None:
        """Prepare the weights, [in,out]."""
        width, heads = layer.heads * layer.head_dim, (layer.heads, layer.head_dim)
        inputs = [layer.q_proj, layer.k_proj, layer.v_proj, layer.f_a_proj, layer.b_proj]
        inputs.append(layer.g_proj if layer.full_rank_gate else layer.g_a_proj)
        weights = [projection.weight for projection in inputs]
        self.project_inputs = Projections(weights, batch)
        widths = [3 * width, *(len(weight) for weight in weights[3:])]
        # [B,3*H*K], [B,K], [B,H], and [B,H*K] or [B,K]
        self.qkv, self.forget, self.beta, gate = torch.split(self.project_inputs.out, widths, dim=-1)
        self.expand_forget, self.dt_bias = Projections([layer.f_b_proj.weight], batch), layer.dt_bias
        self.expand_gate = None
        if not layer.full_rank_gate:
            self.low_rank_gate = gate  # [B,K]
            self.expand_gate = Projections([layer.g_b_proj.weight], batch)
            gate = self.expand_gate.out
        self.z, self.gate = self.expand_forget.out.view(batch, *heads), gate.view(batch, *heads)  # [B,H,K]
        self.o = Projections([layer.o_proj.weight], batch)
        self.decode = decode_function(layer.backend, layer.o_norm.weight)
        self.constants = KdaConstants(
            taps=layer.taps().contiguous(),
            a_log=layer.A_log,
            lower_bound=layer.gate_lower_bound,
            out_weight=layer.o_norm.weight * math.sqrt(layer.head_dim),
            out_floor=layer.head_dim * math.sqrt(layer.o_norm.eps),
        )

    def __call__(self, x: Tensor, state: KdaState, total: Tensor | None) -> Tensor:
        """Normed x [B,D] -> total [B,D] plus the layer's output; the state is advanced."""
        self.project_inputs(x)
        self.expand_forget(self.forget, self.dt_bias)
        if self.expand_gate is not None:
            self.expand_gate(self.low_rank_gate)
        y = self.decode(self.qkv, self.z, self.beta, self.gate, self.constants, state.tail, state.memory)
        return self.o(y.flatten(1), total)


class MlaStep:
    """What `MlaAttention` computes for one token, on the latents: kv_b_proj is absorbed into query and output."""

    def __init__(self, layer: MlaAttention, batch: int) -> None:
        """Prepare the weights, [in,out]."""
        inputs = [layer.q_a_proj if layer.low_rank_query else layer.q_proj, layer.kv_a_proj_with_mqa]
        weights = [projection.weight for projection in [*inputs, *([layer.g_proj] if layer.gated else [])]]
        self.project_inputs = Projections(weights, batch)
        projected, latent_width = self.project_inputs.out, layer.latent_dim + layer.rope_dim
        # queries or their latents, [B,C+R], and the gate if there is one, [B,H*V]
        widths = [len(weights[0]), latent_width, *(len(weight) for weight in weights[2:])]
        query, row, *gate = torch.split(projected, widths, dim=-1)
        self.gate = gate[0] if gate else None
        self.expand_query = None
        if layer.low_rank_query:
            self.query_norm, self.query_latent = NormStep(layer.q_a_layernorm, batch), query
            self.expand_query = Projections([layer.q_b_proj.weight], batch)
            query = self.expand_query.out
        q = query.view(batch, layer.heads, -1)  # [B,H,N+R]
        self.latent, self.row = row[:, : layer.latent_dim], row.unsqueeze(1)  # [B,C], [B,1,C+R]
        self.kv_norm = NormStep(layer.kv_a_layernorm, batch, out=self.latent)
        expand = layer.kv_b_proj.weight.float().view(layer.heads, -1, layer.latent_dim)  # [H,N+V,C]
        self.attend: LatentAttention | AttentionStep
        if can_multiply([expand]):
            self.attend = LatentAttention(q, expand, self.gate, layer.nope_dim, layer.scale)
        else:
            self.attend = AttentionStep(q, expand, self.gate, layer.nope_dim, layer.scale)
        self.o = Projections([layer.o_proj.weight], batch)

    def __call__(self, x: Tensor, state: MlaState, total: Tensor | None) -> Tensor:
        """Normed x [B,D] -> total [B,D] plus the layer's output; the state is extended."""
        self.project_inputs(x)
        if self.expand_query is not None:
            self.expand_query(self.query_norm(self.query_latent))
        self.kv_norm(self.latent)
        rows = state.append(self.row)  # [B,L,C+R]
        self.attend(rows)
        return self.o(self.attend.out, total)


class AttentionStep:
    """What the compiled `LatentAttention` computes, with its arguments."""

    def __init__(self, q: Tensor, expand: Tensor, gate: Tensor | None, nope: int, scale: float) -> None:
        """Note them."""
        self.q_nope, self.q_shared = q[..., :nope].transpose(0, 1), q[..., nope:]  # [H,B,N], [B,H,R]
        self.to_key, self.to_value = expand[:, :nope], expand[:, nope:].transpose(1, 2)  # [H,N,C], [H,C,V]
        self.gate, self.scale = gate, scale
        self.out = new_buffer(expand, len(q), len(expand) * self.to_value.shape[2])  # [B,H*V]

    def __call__(self, rows: Tensor) -> None:
        """Attend to rows [B,L,C+R]."""
        q_latent = torch.bmm(self.q_nope, self.to_key).transpose(0, 1)  # [B,H,C]
        queries = torch.cat([q_latent, self.q_shared], dim=-1)  # [B,H,C+R]
        weights = torch.softmax(torch.bmm(queries, rows.transpose(1, 2)) * self.scale, dim=-1)  # [B,H,L]
        attended = torch.bmm(weights, rows[..., : q_latent.shape[2]])  # [B,H,C]
        o = torch.bmm(attended.transpose(0, 1), self.to_value).transpose(0, 1).flatten(1)  # [B,H*V]
        self.out.copy_(o if self.gate is None else o * torch.sigmoid(self.gate))
