"""Hypothesis strategies: any legal configuration of a small model."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

REPEATABLE = settings(derandomize=True, deadline=None, database=None)


@st.composite
def model_configs(draw: st.DrawFn) -> dict[str, Any]:
    """A `model_config` dictionary in which every optional key is sometimes left to its default."""
    layers = draw(st.integers(2, 5))
    kda_layers = sorted(draw(st.sets(st.integers(1, layers))))
    full_attn_layers = [n for n in range(1, layers + 1) if n not in kda_layers]
    config = {
        "vocab_size": draw(st.sampled_from([17, 64])),
        "hidden_size": draw(st.sampled_from([16, 24, 32])),
        "num_hidden_layers": layers,
        "intermediate_size": draw(st.sampled_from([8, 40])),
        "linear_attn_config": draw(linear_attn_configs(kda_layers, full_attn_layers)),
        "max_seq_len": 512,
    }
    config |= draw(attention_keys()) if full_attn_layers else {}
    config |= draw(expert_keys(layers)) if draw(st.booleans()) else {}
    return config | draw(general_keys())


def linear_attn_configs(kda_layers: list[int], full_attn_layers: list[int]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "kda_layers": st.just(kda_layers),
            "full_attn_layers": st.just(full_attn_layers),
            "num_heads": st.integers(1, 3),
            "head_dim": st.sampled_from([4, 8, 12, 16]),
        },
        optional={
            "short_conv_kernel_size": st.integers(1, 5),
            "use_full_rank_gate": st.booleans(),
            "gate_lower_bound": st.sampled_from([None, -5.0, -1.5, -20.0]),
        },
    )


def attention_keys() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "num_attention_heads": st.integers(1, 3),
            "kv_lora_rank": st.sampled_from([5, 12]),
            "qk_nope_head_dim": st.sampled_from([4, 8]),
            "qk_rope_head_dim": st.sampled_from([2, 4]),
            "v_head_dim": st.sampled_from([3, 8, 16]),
        },
        optional={"q_lora_rank": st.sampled_from([None, 6, 16]), "mla_use_output_gate": st.booleans()},
    )


@st.composite
def expert_keys(draw: st.DrawFn, layers: int) -> dict[str, Any]:
    groups, group_size = draw(st.integers(1, 3)), draw(st.integers(2, 3))
    topk_group = draw(st.integers(1, groups))
    required = {
        "num_experts": groups * group_size,
        "num_experts_per_token": draw(st.integers(1, topk_group * group_size)),
        "moe_intermediate_size": draw(st.sampled_from([4, 10])),
        "num_expert_group": groups,
        "topk_group": topk_group,
    }
    optional = {
        "num_shared_experts": st.integers(0, 2),
        "first_k_dense_replace": st.integers(0, layers),
        "moe_layer_freq": st.integers(1, 2),
        "moe_router_activation_func": st.sampled_from(["sigmoid", "softmax"]),
        "moe_renormalize": st.booleans(),
        "routed_scaling_factor": st.sampled_from([0.5, 1.0, 2.446]),
        "routed_expert_hidden_size": st.sampled_from([None, 12]),
        "latent_moe_use_norm": st.booleans(),
    }
    return required | draw(st.fixed_dictionaries({}, optional=optional))


def general_keys() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {},
        optional={
            "hidden_act": st.sampled_from(["situ", "silu"]),
            "activation_situ_beta": st.sampled_from([None, 1.0, 4.0]),
            "activation_situ_linear_beta": st.sampled_from([None, 2.0, 25.0]),
            "attn_res_block_size": st.sampled_from([None, 1, 2, 3, 12]),
            "rms_norm_eps": st.sampled_from([1e-6, 1e-5, 1e-2]),
            "tie_word_embeddings": st.booleans(),
            "pad_token_id": st.integers(0, 16),
            "kda_chunk_size": st.sampled_from([16, 32, 64, 128, 256]),
            "kda_backend": st.sampled_from(["chunkwise", "fused"]),
        },
    )
