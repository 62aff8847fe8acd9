"""A converted directory is laid out like the released ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import mini_config, mk
from conversions import KIMI_LINEAR, KIMI_LINEAR_LIN, config_of, convert, header_of, tensors_of

from kimik3_cli.engine.checkpoint.huggingface.config import config_from
from kimik3_cli.engine.config import KimiK3Config
from kimik3_cli.engine.convert.layout import config_json, form_of
from kimik3_cli.errors import ConfigError

HERE = Path(__file__).parent
RELEASED: dict[str, Any] = json.loads((HERE / "released_k3_config.json").read_text(encoding="utf-8"))
SMALL_K3 = {
    "vocab_size": 32,
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "intermediate_size": 12,
    "num_attention_heads": 3,
    "q_lora_rank": 6,
    "kv_lora_rank": 5,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
    "num_experts": 2,
    "num_experts_per_token": 1,
    "moe_intermediate_size": 6,
    "num_shared_experts": 2,
    "routed_expert_hidden_size": 7,
}
SMALL_K3_LIN = {"kda_layers": [1, 2], "full_attn_layers": [3], "num_heads": 3, "head_dim": 4}


def released_layout() -> dict[str, tuple[str, list[int]]]:
    """Name -> (dtype, shape)."""
    lines = (HERE / "released_k3_layout.txt").read_text(encoding="utf-8").splitlines()
    fields = [line.split() for line in lines if not line.startswith("#")]
    return {name: (dtype, [int(size) for size in sizes]) for name, dtype, *sizes in fields}


def test_names_dtypes_and_shapes_are_those_of_the_released_k3(tmp_path: Path) -> None:
    mk(tmp_path / "k3.pt", SMALL_K3, lin=SMALL_K3_LIN)
    assert convert(tmp_path / "k3.pt", tmp_path / "k3", dtype="bf16").layout == "kimi_k3"
    header = header_of(tmp_path / "k3" / "model.safetensors")
    assert header.pop("__metadata__") == {"format": "pt"}
    assert {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()} == released_layout()


def test_the_released_configuration_comes_out_as_it_went_in() -> None:
    text = RELEASED["text_config"]
    config = KimiK3Config.from_dict({**text, "max_seq_len": text["max_position_embeddings"]})
    assert form_of(config) == "kimi_k3"
    written = config_json(config, "kimi_k3", "bfloat16")
    assert written.pop("kimik3") == {"kda_chunk_size": 64, "kda_backend": "chunkwise"}
    # neither code nor vision is written, and a checkpoint has no beginning-of-text id
    absent = {"vision_config", "ignore_index", "media_placeholder_token_id", "auto_map", "initializer_range"}
    for theirs, ours in ((RELEASED, written), (text, written["text_config"])):
        expected = {key: value for key, value in theirs.items() if key not in absent}
        assert {**ours, "text_config": None} == {**expected, "text_config": None, "bos_token_id": None}


def test_a_log_is_filled_up_in_k3_and_four_dimensional_in_kimi_linear(tmp_path: Path) -> None:
    made = mk(tmp_path / "k3.pt")["model"]["layers.0.self_attn.A_log"]
    convert(tmp_path / "k3.pt", tmp_path / "k3")
    padded = tensors_of(tmp_path / "k3")["language_model.model.layers.0.self_attn.A_log"]
    assert torch.equal(padded[:2], made)
    assert torch.equal(padded[2:], torch.zeros(14))
    made = mk(tmp_path / "linear.pt", KIMI_LINEAR, lin=KIMI_LINEAR_LIN)["model"]["layers.0.self_attn.A_log"]
    convert(tmp_path / "linear.pt", tmp_path / "linear")
    stored = tensors_of(tmp_path / "linear")["model.layers.0.self_attn.A_log"]
    assert torch.equal(stored, made.view(1, 1, 2, 1))


def test_more_heads_than_head_dim_leave_a_log_as_it_is(tmp_path: Path) -> None:
    mk(tmp_path / "k3.pt", lin={"num_heads": 8, "head_dim": 4})
    convert(tmp_path / "k3.pt", tmp_path / "k3")
    assert tensors_of(tmp_path / "k3")["language_model.model.layers.0.self_attn.A_log"].shape == (8,)


@pytest.mark.parametrize(
    ("cfg", "lin", "form"),
    [
        ({}, {}, "kimi_linear"),
        ({"q_lora_rank": 16}, {}, "kimi_linear"),
        ({"num_experts": None}, {}, "kimi_linear"),
        ({"moe_layer_freq": 2}, {}, "kimi_linear"),
        ({"mla_use_output_gate": True}, {"kda_layers": [1, 2, 3, 4, 5], "full_attn_layers": []}, "kimi_linear"),
        ({}, {"kda_layers": [], "full_attn_layers": [1, 2, 3, 4, 5], "gate_lower_bound": -5.0}, "kimi_linear"),
        ({"num_experts": None, "moe_router_activation_func": "softmax"}, {}, "kimi_linear"),
        ({"hidden_act": "situ"}, {}, "kimi_k3"),
        ({"attn_res_block_size": 12}, {}, "kimi_k3"),
        ({"mla_use_output_gate": True}, {}, "kimi_k3"),
        ({"routed_expert_hidden_size": 16}, {}, "kimi_k3"),
        ({"moe_router_activation_func": "softmax"}, {}, "kimi_k3"),
        ({"num_experts": 1, "num_experts_per_token": 1}, {}, "kimi_k3"),
        ({}, {"gate_lower_bound": -5.0}, "kimi_k3"),
        ({}, {"use_full_rank_gate": True}, "kimi_k3"),
    ],
)
def test_the_flat_form_is_for_what_transformers_can_run(cfg: dict[str, Any], lin: dict[str, Any], form: str) -> None:
    raw = mini_config({**KIMI_LINEAR, **cfg}, {**KIMI_LINEAR_LIN, **lin})
    assert form_of(KimiK3Config.from_dict(raw)) == form


def test_the_flat_form_says_which_layers_have_experts(tmp_path: Path) -> None:
    mk(tmp_path / "linear.pt", {**KIMI_LINEAR, "moe_layer_freq": 2}, lin=KIMI_LINEAR_LIN)
    convert(tmp_path / "linear.pt", tmp_path / "linear")
    config = config_of(tmp_path / "linear")
    assert config["mlp_layer_types"] == ["dense", "dense", "sparse", "dense", "sparse"]
    assert (config["model_type"], config["architectures"]) == ("kimi_linear", ["KimiLinearForCausalLM"])


def test_a_tied_head_is_written_out_because_engines_do_not_tie(tmp_path: Path) -> None:
    mk(tmp_path / "tied.pt", {"tie_word_embeddings": True})
    result = convert(tmp_path / "tied.pt", tmp_path / "tied")
    tensors, config = tensors_of(tmp_path / "tied"), config_of(tmp_path / "tied")
    head = tensors["language_model.lm_head.weight"]
    assert torch.equal(head, tensors["language_model.model.embed_tokens.weight"])
    assert config["tie_word_embeddings"] is config["text_config"]["tie_word_embeddings"] is False
    assert config["kimik3"]["tie_word_embeddings"] is True
    assert result.parameters == sum(use.parameters for use in result.dtypes) == 54_364


def test_generation_ids(tmp_path: Path) -> None:
    mk(tmp_path / "a.pt", {"eos_token_id": [5, 7], "pad_token_id": 3})
    convert(tmp_path / "a.pt", tmp_path / "a")
    written = json.loads((tmp_path / "a" / "generation_config.json").read_text(encoding="utf-8"))
    assert written == {"eos_token_id": [5, 7], "pad_token_id": 3}
    assert config_of(tmp_path / "a")["eos_token_id"] == [5, 7]


def test_no_code_is_promised(tmp_path: Path) -> None:
    mk(tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "a")
    assert "auto_map" not in (tmp_path / "a" / "config.json").read_text(encoding="utf-8")


def test_the_object_of_our_own_is_as_strict_as_a_checkpoint() -> None:
    written = config_json(KimiK3Config.from_dict(mini_config()), "kimi_k3", "float32")
    assert config_from(written).to_dict() == KimiK3Config.from_dict(mini_config()).to_dict()
    with pytest.raises(ConfigError, match=r"config.json: kimik3 is 3; it must be an object"):
        config_from({**written, "kimik3": 3})
    with pytest.raises(ConfigError, match=r"kda_chunk is not a key of this architecture"):
        config_from({**written, "kimik3": {"kda_chunk": 64}})
