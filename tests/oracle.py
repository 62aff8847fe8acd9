"""The K3 text model in plain float64, the KDA recurrence token by token.

Written from docs/architecture.md alone and independent of the package: nothing here imports `kimik3_cli`, and every
formula takes the most obvious form. Letters in the shapes: T tokens, D hidden size, H heads, K and V per-head key and
value sizes, E experts. There is no batch dimension except in `kda_recurrence_f64`.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

LATENT_NORM_EPS = 1e-6
DEFAULTS: dict[str, Any] = {
    "q_lora_rank": None,
    "mla_use_output_gate": True,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "attn_res_block_size": 12,
    "num_experts": None,
    "num_experts_per_token": None,
    "moe_intermediate_size": None,
    "num_shared_experts": 0,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "routed_scaling_factor": 1.0,
    "num_expert_group": 1,
    "topk_group": 1,
    "routed_expert_hidden_size": None,
    "latent_moe_use_norm": True,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": None,
    "kda_chunk_size": 64,
    "kda_backend": "chunkwise",
}
LINEAR_DEFAULTS: dict[str, Any] = {"short_conv_kernel_size": 4, "use_full_rank_gate": True, "gate_lower_bound": -5.0}


class OracleRun(NamedTuple):
    """All that one pass leaves behind."""

    logits: Tensor
    """[T, vocab]"""
    kda_states: dict[int, Tensor]
    """0-based layer -> S after the last token, [H, K, V]"""
    conv_tails: dict[int, dict[str, Tensor]]
    """0-based layer -> "q", "k", "v" -> the last kernel - 1 inputs of its convolution, [H*K, kernel-1], oldest first"""
    routing_gap: float
    """The smallest distance between a chosen and a left-out expert's (or group's) score; inf without a choice"""


def oracle_logits(checkpoint: dict[str, Any], ids: Sequence[int]) -> Tensor:
    """The logits [T, vocab] of every prefix of `ids`, for a format-7 dictionary with plain tensor names."""
    return oracle_run(checkpoint, ids).logits


def oracle_states(
    checkpoint: dict[str, Any], ids: Sequence[int]
) -> tuple[dict[int, Tensor], dict[int, dict[str, Tensor]]]:
    """The recurrent states and the convolution tails after `ids`, each by 0-based layer."""
    run = oracle_run(checkpoint, ids)
    return run.kda_states, run.conv_tails


def with_defaults(model_config: dict[str, Any]) -> dict[str, Any]:
    """`model_config` with every optional key of the checkpoint format filled in."""
    linear = {**LINEAR_DEFAULTS, **model_config["linear_attn_config"]}
    return {**DEFAULTS, **model_config, "linear_attn_config": linear}


def oracle_run(checkpoint: dict[str, Any], ids: Sequence[int]) -> OracleRun:
    """One pass over `ids` from an empty state."""
    model = _Model(with_defaults(checkpoint["model_config"]), checkpoint["model"])
    logits = model.logits(torch.tensor(ids))
    return OracleRun(logits, model.kda_states, model.conv_tails, model.routing_gap)


def kda_recurrence_f64(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The delta rule one token at a time, in float64.

    q, k, g are [B,T,H,K], v is [B,T,H,V], beta [B,T,H], the state [B,H,K,V]. q and k are used as they are.
    Returns the outputs [B,T,H,V] and the final state.
    """
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    batch, length, heads, key_size = k.shape
    state = k.new_zeros(batch, heads, key_size, v.shape[-1]) if initial_state is None else initial_state.double()
    outputs = []
    for t in range(length):
        state = state * g[:, t].exp()[..., None]
        recalled = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        correction = beta[:, t, :, None] * (v[:, t] - recalled)
        state = state + k[:, t, :, :, None] * correction[:, :, None, :]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, dim=1), state


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def activation(config: dict[str, Any], gate: Tensor, up: Tensor) -> Tensor:
    if config["hidden_act"] == "silu":
        return gate * gate.sigmoid() * up
    cap, linear_cap = config["activation_situ_beta"], config["activation_situ_linear_beta"]
    cap = 1.0 if cap is None else cap
    bounded_up = up if linear_cap is None else linear_cap * (up / linear_cap).tanh()
    return cap * (gate / cap).tanh() * gate.sigmoid() * bounded_up


def residual_mix(sources: list[Tensor], norm_weight: Tensor, proj_weight: Tensor, eps: float) -> Tensor:
    """Softmax-weighted sum of `sources`, each [T, D]; the keys are normalised, the values raw."""
    values = torch.stack(sources)
    keys = values / (values.square().mean(-1, keepdim=True) + eps).sqrt()
    scores = (keys * norm_weight * proj_weight[0]).sum(-1)
    return (scores.softmax(0)[..., None] * values).sum(0)


def short_conv(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """SiLU(causal depthwise convolution) of x [T, C] with weight [C, 1, kernel]; also the tail [C, kernel-1]."""
    length, kernel = x.shape[0], weight.shape[-1]
    padded = torch.cat([x.new_zeros(kernel - 1, x.shape[1]), x])
    y = sum(padded[tap : tap + length] * weight[:, 0, tap] for tap in range(kernel))
    return y * y.sigmoid(), padded[length:].T


def log_decay(a_log: Tensor, z: Tensor, lower_bound: float | None) -> Tensor:
    """The gate g <= 0 for z [T, H, K] (dt_bias already added) and a_log [H]."""
    rate = a_log.exp()[:, None]
    return -rate * softplus(z) if lower_bound is None else lower_bound * (rate * z).sigmoid()


class _Model:
    """One checkpoint's tensors in float64, with what a pass leaves behind."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.config = config
        self.tensors = {name: tensor.double() for name, tensor in tensors.items()}
        self.kda_states: dict[int, Tensor] = {}
        self.conv_tails: dict[int, dict[str, Tensor]] = {}
        self.routing_gap = math.inf

    def weight(self, name: str) -> Tensor:
        return self.tensors[name + ".weight"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weight(name).T

    def norm(self, name: str, x: Tensor, eps: float | None = None) -> Tensor:
        return rms_norm(x, self.weight(name), self.config["rms_norm_eps"] if eps is None else eps)

    def mix(self, name: str, blocks: list[Tensor], h: Tensor) -> Tensor:
        eps = self.config["rms_norm_eps"]
        return residual_mix([*blocks, h], self.weight(name + "_norm"), self.weight(name + "_proj"), eps)

    def vocabulary_weight(self, name: str) -> Tensor:
        other = {"embed_tokens": "lm_head", "lm_head": "embed_tokens"}[name]
        stands_in = self.config["tie_word_embeddings"] and name + ".weight" not in self.tensors
        return self.weight(other if stands_in else name)

    def logits(self, ids: Tensor) -> Tensor:
        h = self.vocabulary_weight("embed_tokens")[ids]
        run = self.plain_layers if self.config["attn_res_block_size"] is None else self.mixed_layers
        return self.norm("norm", run(h)) @ self.vocabulary_weight("lm_head").T

    def plain_layers(self, h: Tensor) -> Tensor:
        for i in range(self.config["num_hidden_layers"]):
            h = h + self.attention(i, self.norm(f"layers.{i}.input_layernorm", h))
            h = h + self.ffn(i, self.norm(f"layers.{i}.post_attention_layernorm", h))
        return h

    def mixed_layers(self, h: Tensor) -> Tensor:
        blocks: list[Tensor] = []
        for i in range(self.config["num_hidden_layers"]):
            name = f"layers.{i}."
            a = self.mix(name + "self_attention_res", blocks, h) if blocks else h
            starts_block = i % self.config["attn_res_block_size"] == 0
            if starts_block:
                blocks.append(h)
            y = self.attention(i, self.norm(name + "input_layernorm", a))
            h = y if starts_block else h + y
            m = self.mix(name + "mlp_res", blocks, h)
            h = h + self.ffn(i, self.norm(name + "post_attention_layernorm", m))
        return self.mix("output_attn_res", blocks, h)

    def attention(self, i: int, x: Tensor) -> Tensor:
        return self.kda(i, x) if i + 1 in self.config["linear_attn_config"]["kda_layers"] else self.mla(i, x)

    def kda(self, i: int, x: Tensor) -> Tensor:
        linear_config, name = self.config["linear_attn_config"], f"layers.{i}.self_attn."
        heads, size, length = linear_config["num_heads"], linear_config["head_dim"], x.shape[0]
        qkv, tails = {}, {}
        for letter in "qkv":
            mixed, tails[letter] = short_conv(
                self.linear(f"{name}{letter}_proj", x), self.weight(f"{name}{letter}_conv1d")
            )
            qkv[letter] = mixed.view(length, heads, size)
        q, k = (qkv[n] / (qkv[n].square().sum(-1, keepdim=True) + 1e-6).sqrt() for n in "qk")
        beta = self.linear(name + "b_proj", x).sigmoid()
        z = self.linear(name + "f_b_proj", self.linear(name + "f_a_proj", x)) + self.tensors[name + "dt_bias"]
        # Files hold A_log as [H], padded at the end, or as [1, 1, H, 1].
        a_log = self.tensors[name + "A_log"].flatten()[:heads]
        g = log_decay(a_log, z.view(length, heads, size), linear_config["gate_lower_bound"])
        inputs = (t[None] for t in (q * size**-0.5, k, qkv["v"], g, beta))
        o, state = kda_recurrence_f64(*inputs)
        self.kda_states[i], self.conv_tails[i] = state[0], tails
        if linear_config["use_full_rank_gate"]:
            gate = self.linear(name + "g_proj", x)
        else:
            gate = self.linear(name + "g_b_proj", self.linear(name + "g_a_proj", x))
        o = self.norm(name + "o_norm", o[0]).reshape(length, -1) * gate.sigmoid()
        return self.linear(name + "o_proj", o)

    def mla(self, i: int, x: Tensor) -> Tensor:
        c, name, length = self.config, f"layers.{i}.self_attn.", x.shape[0]
        heads, nope, rope = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        if c["q_lora_rank"] is None:
            q = self.linear(name + "q_proj", x)
        else:
            latent = self.norm(name + "q_a_layernorm", self.linear(name + "q_a_proj", x), LATENT_NORM_EPS)
            q = self.linear(name + "q_b_proj", latent)
        q = q.view(length, heads, nope + rope)
        compressed, shared_key = self.linear(name + "kv_a_proj_with_mqa", x).split([c["kv_lora_rank"], rope], dim=-1)
        compressed = self.norm(name + "kv_a_layernorm", compressed, LATENT_NORM_EPS)
        expanded = self.linear(name + "kv_b_proj", compressed).view(length, heads, nope + c["v_head_dim"])
        own_key, v = expanded.split([nope, c["v_head_dim"]], dim=-1)
        k = torch.cat([own_key, shared_key[:, None].expand(length, heads, rope)], dim=-1)
        scores = torch.einsum("ihd,jhd->hij", q, k) * (nope + rope) ** -0.5
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        o = torch.einsum("hij,jhd->ihd", scores.masked_fill(future, -math.inf).softmax(-1), v).reshape(length, -1)
        if c["mla_use_output_gate"]:
            o = o * self.linear(name + "g_proj", x).sigmoid()
        return self.linear(name + "o_proj", o)

    def ffn(self, i: int, x: Tensor) -> Tensor:
        c = self.config
        if c["num_experts"] is None or i < c["first_k_dense_replace"] or i % c["moe_layer_freq"] != 0:
            return self.gated_ffn(f"layers.{i}.mlp.", ("gate_proj", "up_proj", "down_proj"), x)
        return self.moe(f"layers.{i}.block_sparse_moe.", x)

    def gated_ffn(self, name: str, matrices: tuple[str, str, str], x: Tensor) -> Tensor:
        gate, up, down = (name + matrix for matrix in matrices)
        return self.linear(down, activation(self.config, self.linear(gate, x), self.linear(up, x)))

    def moe(self, name: str, x: Tensor) -> Tensor:
        c = self.config
        latent = x if c["routed_expert_hidden_size"] is None else self.linear(name + "routed_expert_down_proj", x)
        weights = self.routing(name + "gate", x)
        y = torch.zeros_like(latent)
        for e in range(c["num_experts"]):
            y = y + weights[:, e, None] * self.gated_ffn(f"{name}experts.{e}.", ("w1", "w3", "w2"), latent)
        if c["routed_expert_hidden_size"] is not None:
            y = self.norm(name + "routed_expert_norm", y) if c["latent_moe_use_norm"] else y
            y = self.linear(name + "routed_expert_up_proj", y)
        if c["num_shared_experts"] > 0:
            y = y + self.gated_ffn(name + "shared_experts.", ("gate_proj", "up_proj", "down_proj"), x)
        return y

    def routing(self, name: str, x: Tensor) -> Tensor:
        """The weight of every expert for every token [T, E], zero for those not chosen."""
        c = self.config
        router_logits = self.linear(name, x)
        scores = router_logits.sigmoid() if c["moe_router_activation_func"] == "sigmoid" else router_logits.softmax(-1)
        biased = scores + self.tensors[name + ".e_score_correction_bias"]
        weights = torch.zeros_like(scores)
        for t in range(len(x)):
            chosen = self.choose(biased[t])
            total = scores[t, chosen].sum() + 1e-20
            share = total if c["moe_renormalize"] and len(chosen) > 1 else 1.0
            weights[t, chosen] = scores[t, chosen] / share * c["routed_scaling_factor"]
        return weights

    def choose(self, biased: Tensor) -> list[int]:
        """The experts of one token, from their biased scores [E]."""
        c = self.config
        members = torch.arange(len(biased)).view(c["num_expert_group"], -1)
        allowed = range(len(biased))
        if c["num_expert_group"] > 1:
            group_scores = torch.stack([biased[group].topk(2).values.sum() for group in members])
            groups = self.highest(group_scores, list(range(len(members))), c["topk_group"])
            allowed = members[groups].flatten().tolist()
        return self.highest(biased, list(allowed), c["num_experts_per_token"])

    def highest(self, scores: Tensor, candidates: list[int], count: int) -> list[int]:
        ranked = sorted(candidates, key=lambda index: -scores[index].item())
        if count < len(ranked):
            gap = scores[ranked[count - 1]] - scores[ranked[count]]
            self.routing_gap = min(self.routing_gap, gap.item())
        return ranked[:count]
