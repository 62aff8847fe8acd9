"""Directories that others have made become files: packed experts, vision towers, models saved by transformers."""

import json
from pathlib import Path

import pytest
import torch
from checkpoints import ids, mini_config
from conversions import convert
from directories import config_json, released_name, save_directory, save_mini
from safetensors.torch import save_file
from tensor_list import tensor_shapes
from transformers import KimiLinearConfig, KimiLinearForCausalLM

from kimik3_cli.engine import load_checkpoint_model, next_token_logits
from kimik3_cli.engine.checkpoint.inspection import inspect_checkpoint

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
QUANTIZATION = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}


def save_packed(folder: Path) -> dict[str, torch.Tensor]:
    """A model whose experts are packed; returns what they hold, by the names of the model."""
    config = mini_config({"routed_expert_hidden_size": 32, "moe_intermediate_size": 64})
    generator = torch.Generator().manual_seed(3)
    stored, decoded = {}, {}
    for name, shape in tensor_shapes(config).items():
        if ".experts." not in name:
            stored[released_name(name)] = torch.rand(shape, generator=generator).bfloat16()
            continue
        rows, columns = shape
        codes = torch.randint(0, 16, (rows, columns), generator=generator)
        scales = torch.randint(0, 250, (rows, columns // 32), generator=generator)  # down to 2^-127
        stored[released_name(name) + "_packed"] = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)
        stored[released_name(name) + "_scale"] = scales.to(torch.uint8)
        decoded[name] = E2M1.double()[codes] * torch.exp2(scales.double() - 127).repeat_interleave(32, dim=1)
    raw = config_json(config)
    raw["text_config"]["quantization_config"] = QUANTIZATION
    save_directory(folder, raw, stored)
    return decoded


@pytest.mark.parametrize(
    ("asked", "dtype"), [(None, torch.bfloat16), ("bf16", torch.bfloat16), ("fp32", torch.float32)]
)
def test_packed_experts_are_unpacked_exactly(asked: str | None, dtype: torch.dtype, tmp_path: Path) -> None:
    decoded = save_packed(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b.pt", dtype=asked)
    found = torch.load(tmp_path / "b.pt", weights_only=True)["model"]
    for name, tensor in decoded.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name].double(), tensor), name
    assert inspect_checkpoint(tmp_path / "b.pt", deep=True).problems == []


def test_a_vision_tower_stays_behind_and_is_named(tmp_path: Path) -> None:
    tensors = save_mini(tmp_path / "a")
    vision = {"vision_tower.encoder.blocks.0.wo.weight": torch.ones(3), "mm_projector.proj.0.weight": torch.ones(2)}
    save_file({**tensors, **vision}, tmp_path / "a" / "model.safetensors")
    result = convert(tmp_path / "a", tmp_path / "b.pt")
    assert sorted(result.dropped) == ["mm_projector", "vision_config", "vision_tower"]
    assert result.parameters == 56_412


def test_a_model_that_transformers_has_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = KimiLinearConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=8,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        num_local_experts=6,
        num_experts_per_tok=2,
        linear_head_dim=8,
        linear_num_heads=3,
        max_position_embeddings=512,
        layer_types=[*["linear_attention"] * 3, "full_attention"],
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
    )
    theirs = KimiLinearForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b.pt")
    assert convert(tmp_path / "b.pt", tmp_path / "c").layout == "kimi_linear"
    again = KimiLinearForCausalLM.from_pretrained(tmp_path / "c").eval()
    prompt = ids(70)
    with torch.no_grad():
        wanted, other = (model(torch.tensor([prompt])).logits[0, -1] for model in (theirs, again))
    mine = next_token_logits(load_checkpoint_model(tmp_path / "b.pt")[0], prompt)
    assert torch.equal(wanted, other)
    assert (mine - wanted).abs().max() <= 1e-4 * wanted.abs().max()
    assert json.loads((tmp_path / "c" / "config.json").read_text(encoding="utf-8"))["eos_token_id"] == 2
