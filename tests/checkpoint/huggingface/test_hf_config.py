"""config.json: every spelling of one architecture reads as the same configuration; nothing is dropped in silence."""

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import mini_config
from directories import RELEASED, config_json

from kimik3_cli.engine.checkpoint.huggingface.config import GENERIC_KEYS, config_from, read_configs
from kimik3_cli.engine.config import KimiK3Config
from kimik3_cli.errors import CheckpointError, ConfigError

# The released Kimi Linear 48B A3B, key for key as far as it decides anything.
KIMI_LINEAR: dict[str, Any] = {
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1_048_576,
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": 163839,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


# Experts in layers that are not every second, third, ... from some layer on.
MIXED = ["dense", "sparse", "sparse", "dense", "sparse", *["dense"] * 22]
PATTERN = "experts in layers [1, 2, 4], but num_experts 256, first_k_dense_replace 1 and moe_layer_freq 1 give them to"


def changed(**changes: Any) -> dict[str, Any]:
    """The released Kimi Linear with some keys replaced; None removes one."""
    return {
        key: value for key, value in {**KIMI_LINEAR, **changes}.items() if value is not None or key == "q_lora_rank"
    }


def nested(**outer: Any) -> dict[str, Any]:
    return {**config_json(mini_config()), **outer}


def test_the_released_k3() -> None:
    config = config_from(json.loads(RELEASED.read_text(encoding="utf-8")))
    assert (config.num_hidden_layers, config.num_experts, config.attn_res_block_size) == (93, 896, 12)
    assert (config.hidden_act, config.linear_attn_config.gate_lower_bound) == ("situ", -5.0)
    assert (config.max_seq_len, config.eos_token_ids, config.pad_token_id) == (1_048_576, (163586,), 163839)
    assert (config.latent_moe_use_norm, config.mla_use_output_gate, config.rms_norm_eps) == (True, True, 1e-5)


def test_the_released_kimi_linear() -> None:
    """What it leaves out is what its own code takes, not what a trainer's checkpoint would mean."""
    config = config_from(KIMI_LINEAR)
    linear = config.linear_attn_config
    assert (config.hidden_act, config.attn_res_block_size, config.mla_use_output_gate) == ("silu", None, False)
    assert (linear.gate_lower_bound, linear.use_full_rank_gate) == (None, False)
    assert (config.routed_expert_hidden_size, config.latent_moe_use_norm) == (None, False)
    assert (config.max_seq_len, config.routed_scaling_factor) == (1_048_576, 2.446)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "silu"),
        ("rms_norm_eps", 1e-6),
        ("tie_word_embeddings", False),
        ("attn_res_block_size", None),
        ("mla_use_output_gate", False),
        ("latent_moe_use_norm", False),
        ("activation_situ_beta", None),
        ("activation_situ_linear_beta", None),
        ("moe_router_activation_func", "sigmoid"),
        ("moe_renormalize", True),
        ("num_shared_experts", 0),
        ("first_k_dense_replace", 0),
        ("pad_token_id", 0),
        ("eos_token_id", None),
    ],
)
def test_what_is_left_out(key: str, value: object) -> None:
    assert getattr(config_from(changed(**{key: None})), key) == value


def test_a_nested_file_reads_as_the_trainers_configuration() -> None:
    assert config_from(config_json(mini_config())) == KimiK3Config.from_dict(mini_config())


def test_the_outer_level_speaks_where_the_inner_one_is_silent() -> None:
    raw = nested(eos_token_id=[5, 0], tie_word_embeddings=True, torch_dtype="bfloat16", transformers_version="5")
    del raw["text_config"]["tie_word_embeddings"]
    config = config_from(raw)
    assert (config.eos_token_ids, config.tie_word_embeddings) == ((5, 0), True)


def test_the_names_of_transformers() -> None:
    """Both sets of names that its releases write, the layers as lists of kinds, and both at once."""
    kinds = ["full_attention" if layer % 4 == 0 or layer == 27 else "linear_attention" for layer in range(1, 28)]
    theirs = changed(
        num_experts=None,
        num_experts_per_token=None,
        num_shared_experts=None,
        num_expert_group=None,
        moe_renormalize=None,
        model_max_length=None,
        linear_attn_config=None,
        first_k_dense_replace=None,
        num_local_experts=256,
        num_experts_per_tok=8,
        n_shared_experts=1,
        n_group=1,
        norm_topk_prob=True,
        max_position_embeddings=1_048_576,
        layer_types=kinds,
        mlp_layer_types=["dense", *["sparse"] * 26],
        linear_head_dim=128,
        linear_num_heads=32,
        linear_conv_kernel_dim=4,
        qk_head_dim=192,
        pretraining_tp=1,
    )
    assert config_from(theirs) == config_from(KIMI_LINEAR)
    assert config_from({**KIMI_LINEAR, **theirs}) == config_from(KIMI_LINEAR)


def test_every_layer_dense() -> None:
    config = config_from(changed(first_k_dense_replace=None, mlp_layer_types=["dense"] * 27))
    assert not any(config.is_moe(layer) for layer in range(27))


def test_every_second_layer_sparse() -> None:
    raw = changed(first_k_dense_replace=None, moe_layer_freq=None, mlp_layer_types=["dense", "dense", "sparse"] * 9)
    with pytest.raises(ConfigError, match="mlp_layer_types has experts in layers"):
        config_from(raw)  # layers 2, 5, 8, ... are no multiples of 3
    config = config_from({**raw, "mlp_layer_types": ["dense", "dense", *["sparse", "dense"] * 12, "sparse"]})
    assert [layer for layer in range(27) if config.is_moe(layer)] == list(range(2, 27, 2))


def test_a_model_without_experts_whose_numbers_transformers_filled_in() -> None:
    """It writes 256 experts beside a list of dense layers, and the list is what it computes."""
    config = config_from(changed(first_k_dense_replace=0, mlp_layer_types=["dense"] * 27))
    assert (config.num_experts, config.num_experts_per_token) == (None, None)


@pytest.mark.parametrize("key", sorted(GENERIC_KEYS))
def test_keys_that_transformers_writes_everywhere(key: str) -> None:
    assert config_from({**KIMI_LINEAR, key: "anything"}) == config_from(KIMI_LINEAR)


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (changed(sliding_window=4096), "sliding_window is not a key of this architecture"),
        (nested(sliding_window=4096), "sliding_window is not a key of this architecture"),
        (changed(model_type="llama"), "has model_type 'llama'; kimik3 runs kimi_k3 and kimi_linear"),
        (changed(model_type=None), "has model_type None; kimik3 runs"),
        (nested(text_config=[1]), "has model_type kimi_k3 and no text_config object"),
        (changed(model_max_length=None), "max_position_embeddings is missing"),
        (changed(max_position_embeddings=5), "model_max_length is 1048576, but max_position_embeddings is 5"),
        (changed(num_experts_per_tok=4), "num_experts_per_tok is 4, but num_experts_per_token is 8; make them agree"),
        (changed(linear_head_dim=64), "linear_head_dim is 64, but head_dim is 128"),
        (changed(layer_types=["full_attention"] * 27), "layer_types is [], but linear_attn_config.kda_layers is"),
        (changed(layer_types=["sliding_attention"]), "layer_types holds 'sliding_attention'; it must be a list of"),
        (changed(layer_types=3), "layer_types holds 3"),
        (changed(layer_types=[["full_attention"]]), "layer_types holds ['full_attention']"),
        (changed(mlp_layer_types=["sparse"] * 27), "mlp_layer_types has experts in layers [0, 1, 2, 3"),
        (changed(mlp_layer_types=MIXED, first_k_dense_replace=None, moe_layer_freq=None), PATTERN),
        (changed(mlp_layer_types=["mixed"]), "mlp_layer_types holds 'mixed'"),
        (changed(linear_attn_config=[1]), "linear_attn_config"),
        (changed(rope_interleave=True), "rope_interleave is not a key"),
        (changed(mla_use_nope=False), "mla_use_nope is False; this architecture has only True"),
        (changed(vocab_size="many"), "vocab_size is 'many'"),
        (changed(vocab_size=None), "vocab_size is missing"),
        (nested(tie_word_embeddings=True), "tie_word_embeddings is True, but text_config.tie_word_embeddings is False"),
        (nested(hidden_size=64), "hidden_size is 64, but text_config.hidden_size is 32; make them agree"),
        (changed(quantization_config={"quant_method": "fp8"}), "quantization_config is fp8 None; kimik3 decodes"),
        (changed(quantization_config={"quant_method": "gptq", "bits": 4}), "gptq"),
        (changed(quantization_config=[4]), "quantization_config is None None"),
        (changed(quantization_config={"quant_method": ["fp8"], "format": [], "config_groups": {"a": 1}}), "fp8"),
        (
            changed(quantization_config={"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}),
            "compressed-tensors nvfp4-pack-quantized; kimik3 decodes compressed-tensors mxfp4-pack-quantized only",
        ),
        (
            changed(
                quantization_config={
                    "quant_method": "compressed-tensors",
                    "format": "mxfp4-pack-quantized",
                    "config_groups": {"group_0": {"weights": {"group_size": 16}}},
                }
            ),
            "quantization_config has {'group_size': 16}",
        ),
    ],
)
def test_what_is_refused(raw: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_from(raw)
    assert what in str(refused.value)
    assert str(refused.value).startswith("config.json")
    assert "model_config" not in str(refused.value)


ONE = {"num_experts_per_token": None, "moe_renormalize": None, "num_experts_per_tok": 1}
KINDS = ["dense", *["sparse"] * 26]


@pytest.mark.parametrize("theirs", [{"norm_topk_prob": True}, {"moe_renormalize": True, "mlp_layer_types": KINDS}])
def test_one_expert_whose_weight_transformers_makes_1(theirs: dict[str, Any]) -> None:
    raw = changed(**{**ONE, **theirs})
    with pytest.raises(ConfigError, match=r"norm_topk_prob .* is True with num_experts_per_tok 1; transformers then"):
        config_from(raw)
    config_from({**raw, "num_experts_per_tok": 2})
    config_from({key: False if value is True and key in theirs else value for key, value in raw.items()})


def test_one_expert_of_the_released_code() -> None:
    """It renormalizes several only, as kimik3 does."""
    assert config_from(changed(num_experts_per_token=1)).moe_renormalize


def test_a_trainers_own_keys_survive() -> None:
    config = config_from(changed(kda_chunk_size=32, kda_backend="fused", max_seq_len=1_048_576))
    assert (config.kda_chunk_size, config.kda_backend) == (32, "fused")


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.json").write_text(text, encoding="utf-8")


@pytest.mark.parametrize("text", ["", "{", "\x00", "[" * 100_000, "NaN and more"])
def test_a_config_json_that_is_none(text: str, tmp_path: Path) -> None:
    write(tmp_path, config=text)
    with pytest.raises(
        CheckpointError, match=r"config.json \(\d+ bytes\) is no JSON \(.*\); download or copy it again"
    ):
        read_configs(tmp_path)


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"is a directory without config.json; give a checkpoint file, or a Hugging"
    ):
        read_configs(tmp_path)
    write(tmp_path, config="[1]")
    with pytest.raises(ConfigError, match=r"config.json is a list; it must be an object"):
        read_configs(tmp_path)


@pytest.mark.parametrize(
    ("text", "ids"), [("{}", ()), ('{"eos_token_id": 0}', (0,)), ('{"eos_token_id": [5, 0]}', (5, 0)), ("[]", ())]
)
def test_generation_config(text: str, ids: tuple[int, ...], tmp_path: Path) -> None:
    write(tmp_path, config="{}", generation_config=text)
    assert read_configs(tmp_path) == ({}, ids)


@pytest.mark.parametrize("value", ["-1", '"5"', "[true]", "1.0"])
def test_end_ids_that_are_none(value: str, tmp_path: Path) -> None:
    write(tmp_path, config="{}", generation_config=f'{{"eos_token_id": {value}}}')
    with pytest.raises(ConfigError, match=r"has eos_token_id .*; it must be a token id or a list of them"):
        read_configs(tmp_path)
