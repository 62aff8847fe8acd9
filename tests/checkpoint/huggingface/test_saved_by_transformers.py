"""What transformers' own kimi_linear saves loads here, and answers as it does there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from bench_transformers import their_config
from checkpoints import ids, mini_config
from conversions import KIMI_LINEAR, KIMI_LINEAR_LIN
from transformers import KimiLinearForCausalLM

from kimik3_cli.engine import generate_tokens, load_checkpoint_model, next_token_logits
from kimik3_cli.engine.checkpoint.inspection import inspect_checkpoint
from kimik3_cli.engine.config import KimiK3Config

NEW_TOKENS = 40


def theirs(cfg: dict[str, Any], seed: int) -> KimiLinearForCausalLM:
    """A random model of transformers whose gates, norms and biases are not the trivial ones that it starts with."""
    config = KimiK3Config.from_dict(mini_config({**KIMI_LINEAR, **cfg}, KIMI_LINEAR_LIN))
    torch.manual_seed(seed)
    model = KimiLinearForCausalLM(their_config(config)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_vector = parameter.dim() == 1 or name.endswith("A_log")
            parameter.add_(torch.randn_like(parameter), alpha=0.3 if is_vector else 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer), alpha=0.3)
    return model


CASES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "no query latent": {"q_lora_rank": None},
    "groups of experts": {"num_expert_group": 3, "topk_group": 2, "routed_scaling_factor": 2.446},
    "two dense layers": {"first_k_dense_replace": 2, "num_shared_experts": 2, "moe_renormalize": False},
}


@pytest.mark.parametrize("original", [True, False], ids=["released names", "its own names"])
@pytest.mark.parametrize("cfg", CASES.values(), ids=CASES)
def test_the_same_logits_and_tokens(cfg: dict[str, Any], original: bool, tmp_path: Path) -> None:
    other = theirs(cfg, seed=3)
    other.save_pretrained(tmp_path, save_original_format=original, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert inspect_checkpoint(tmp_path, deep=True).problems == []
    model, metadata = load_checkpoint_model(tmp_path)
    assert (metadata.stripped_prefix, metadata.max_seq_len) == ("model.", 512)
    for length in (1, 17, 64, 100):
        prompt = ids(length)
        with torch.inference_mode():
            wanted = other(torch.tensor([prompt])).logits[0, -1]
        difference = (next_token_logits(model, prompt) - wanted).abs().max()
        assert difference <= 1e-4 * wanted.abs().max()
    new = generate_tokens(model, ids(9), max_new_tokens=NEW_TOKENS, eos_id=0)
    wanted_ids = other.generate(
        torch.tensor([ids(9)]), do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=0, pad_token_id=0
    )[0, 9:]
    assert new == wanted_ids.tolist()
    assert len(set(new)) > 1
