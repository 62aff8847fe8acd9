"""transformers' own Kimi Linear runs a converted directory, without code from it, and says the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ids, mk
from conversions import KIMI_LINEAR, KIMI_LINEAR_LIN, convert
from transformers import AutoConfig, AutoModelForCausalLM

from kimik3_cli.engine import generate_tokens, load_checkpoint_model, next_token_logits
from kimik3_cli.errors import CheckpointError

ONLY_MLA: dict[str, Any] = {"kda_layers": [], "full_attn_layers": [1, 2, 3, 4, 5]}
ROUTING = {
    "num_expert_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 2.446,
    "moe_renormalize": False,
    "num_experts_per_token": 3,
    "num_shared_experts": 2,
}
LEFT_OUT = ("shared_experts.gate_proj.weight", "shared_experts.up_proj.weight", "shared_experts.down_proj.weight")


@pytest.mark.parametrize(
    ("cfg", "lin"),
    [
        ({}, {}),
        ({"q_lora_rank": None, "rms_norm_eps": 1e-6}, {}),
        ({"num_experts": None, "num_experts_per_token": None, "moe_intermediate_size": None}, {}),
        ({"moe_layer_freq": 2}, {}),
        (ROUTING, {}),
        ({"num_shared_experts": 0}, {}),
        ({"num_experts_per_token": 1, "routed_scaling_factor": 2.446}, {}),
        ({"tie_word_embeddings": True}, {}),
        ({}, ONLY_MLA),
        ({}, {"short_conv_kernel_size": 2, "num_heads": 3, "head_dim": 8}),
    ],
    ids=["plain", "q_proj", "dense", "freq", "groups", "unshared", "one", "tied", "mla", "kda"],
)
def test_same_logits_and_same_greedy_tokens(cfg: dict[str, Any], lin: dict[str, Any], tmp_path: Path) -> None:
    mk(tmp_path / "a.pt", {**KIMI_LINEAR, **cfg}, lin={**KIMI_LINEAR_LIN, **lin})
    assert convert(tmp_path / "a.pt", tmp_path / "a", max_shard_bytes=60_000).layout == "kimi_linear"
    theirs, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "a", trust_remote_code=False, output_loading_info=True
    )
    # without shared experts transformers still has their matrices, of width 0
    assert all(name.endswith(LEFT_OUT) and "num_shared_experts" in cfg for name in loading.pop("missing_keys"))
    assert not any(loading.values())
    ours, _ = load_checkpoint_model(tmp_path / "a.pt")
    prompt = ids(70)
    mine = next_token_logits(ours, prompt)
    with torch.no_grad():
        other = theirs(torch.tensor([prompt])).logits[0, -1]
    assert (other - mine).abs().max() <= 1e-4 * mine.abs().max()
    new = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=63, pad_token_id=0)[
        0, len(prompt) :
    ]
    assert new.tolist() == generate_tokens(ours, prompt, max_new_tokens=12, eos_id=63)


def test_a_model_of_kda_layers_alone(tmp_path: Path) -> None:
    """transformers cannot cache such a model, but runs it."""
    lin = {"kda_layers": [1, 2, 3, 4, 5], "full_attn_layers": []}
    mk(tmp_path / "a.pt", KIMI_LINEAR, lin={**KIMI_LINEAR_LIN, **lin})
    convert(tmp_path / "a.pt", tmp_path / "a")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    mine = next_token_logits(load_checkpoint_model(tmp_path / "a.pt")[0], ids(70))
    with torch.no_grad():
        other = theirs(torch.tensor([ids(70)]), use_cache=False).logits[0, -1]
    assert (other - mine).abs().max() <= 1e-4 * mine.abs().max()


def test_transformers_reads_the_configuration_as_it_is_meant(tmp_path: Path) -> None:
    made = mk(tmp_path / "a.pt", {**KIMI_LINEAR, "eos_token_id": [5, 7]}, lin=KIMI_LINEAR_LIN)["model_config"]
    convert(tmp_path / "a.pt", tmp_path / "a", dtype="bf16")
    config = AutoConfig.from_pretrained(tmp_path / "a")
    assert config.max_position_embeddings == made["max_seq_len"]
    assert config.num_experts_per_tok == made["num_experts_per_token"]
    assert config.layer_types == [*["linear_attention"] * 3, "full_attention", "linear_attention"]
    assert config.mlp_layer_types == ["dense", *["sparse"] * 4]
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, [5, 7], 0)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "a").dtype == torch.bfloat16


def test_transformers_refuses_what_it_does_not_have(tmp_path: Path) -> None:
    mk(tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "a")
    with pytest.raises(ValueError, match="kimi_k3"):
        AutoConfig.from_pretrained(tmp_path / "a")


DENSE = {"num_experts": None, "num_experts_per_token": None, "moe_intermediate_size": None}


@pytest.mark.parametrize("cfg", [DENSE, {"num_shared_experts": 0}], ids=["dense", "unshared"])
def test_what_transformers_saves_of_a_converted_directory(cfg: dict[str, Any], tmp_path: Path) -> None:
    """It adds numbers of experts to a dense model, and matrices of width 0 to one without shared experts."""
    mk(tmp_path / "a.pt", {**KIMI_LINEAR, **cfg}, lin=KIMI_LINEAR_LIN)
    convert(tmp_path / "a.pt", tmp_path / "a")
    AutoModelForCausalLM.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "saved")
    logits = [next_token_logits(load_checkpoint_model(tmp_path / name)[0], ids(30)) for name in ("a.pt", "saved")]
    assert torch.equal(*logits)
    assert convert(tmp_path / "saved", tmp_path / "b.pt").tensors == convert(tmp_path / "a", tmp_path / "c.pt").tensors


def test_a_head_that_was_trained_apart_is_untied(tmp_path: Path) -> None:
    """transformers does not tie the tables of a converted directory; what they are after training is what counts."""
    mk(tmp_path / "a.pt", {**KIMI_LINEAR, "tie_word_embeddings": True}, lin=KIMI_LINEAR_LIN)
    convert(tmp_path / "a.pt", tmp_path / "a")
    assert load_checkpoint_model(tmp_path / "a")[0].config.tie_word_embeddings
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    with torch.no_grad():
        theirs.lm_head.weight[-1] += 1
    theirs.save_pretrained(tmp_path / "saved")
    model, _ = load_checkpoint_model(tmp_path / "saved")
    assert not model.config.tie_word_embeddings
    with torch.no_grad():
        other = theirs(torch.tensor([ids(30)])).logits[0, -1]
    assert (other - next_token_logits(model, ids(30))).abs().max() <= 1e-4 * other.abs().max()


def test_two_tables_of_a_head_that_config_json_ties_are_refused(tmp_path: Path) -> None:
    mk(tmp_path / "a.pt", KIMI_LINEAR, lin=KIMI_LINEAR_LIN)
    convert(tmp_path / "a.pt", tmp_path / "a")
    path = tmp_path / "a" / "config.json"
    path.write_text(path.read_text(encoding="utf-8").replace('_embeddings": false', '_embeddings": true'), "utf-8")
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings is true; .* \(in a directory: in config.json\)"):
        load_checkpoint_model(tmp_path / "a")
