"""Small random checkpoints of format 7 for any legal configuration.

`mk(path)` writes the "mini" model, which the measured numbers in these tests belong to.
"""

from collections.abc import Callable
from os import PathLike
from typing import Any

import torch
from tensor_list import tensor_shapes
from torch import Tensor

LIN: dict[str, Any] = {
    "kda_layers": [1, 2, 3, 5],
    "full_attn_layers": [4],
    "num_heads": 2,
    "head_dim": 16,
    "short_conv_kernel_size": 4,
    "use_full_rank_gate": True,
    "gate_lower_bound": -5.0,
}
CFG: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "linear_attn_config": LIN,
    "attn_res_block_size": 2,
    "num_experts": 6,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 8,
    "num_shared_experts": 1,
    "routed_expert_hidden_size": 16,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
    "max_seq_len": 512,
}


def mini_config(cfg: dict[str, Any] | None = None, lin: dict[str, Any] | None = None) -> dict[str, Any]:
    """The mini configuration with some keys replaced: `cfg` at the top level, `lin` inside linear_attn_config."""
    config = {**CFG, **(cfg or {})}
    return {**config, "linear_attn_config": {**config["linear_attn_config"], **(lin or {})}}


def checkpoint(model_config: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    """A format-7 dictionary of random weights."""
    return {"format_version": 7, "model_config": model_config, "model": random_weights(model_config, seed)}


def mk(
    path: str | PathLike[str],
    cfg: dict[str, Any] | None = None,
    edit: Callable[[dict[str, Any]], object] | None = None,
    lin: dict[str, Any] | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Write a mini checkpoint to `path` after `edit` has changed it in place; returns what was written."""
    made = checkpoint(mini_config(cfg, lin), seed)
    if edit is not None:
        edit(made)
    torch.save(made, path)
    return made


def fill(suffix: str, value: float) -> Callable[[dict[str, Any]], None]:
    """An edit that sets every tensor whose name ends in `suffix`."""

    def edit(made: dict[str, Any]) -> None:
        for name, tensor in made["model"].items():
            if name.endswith(suffix):
                tensor.fill_(value)

    return edit


def ids(count: int, vocab_size: int = 64, seed: int = 1) -> list[int]:
    """`count` ids other than the pad id 0, the same for the same arguments."""
    return torch.randint(1, vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def random_weights(model_config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Weights of a plausible scale in float32, drawn in the order of `tensor_shapes`."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _draw(name, shape, generator) for name, shape in tensor_shapes(model_config).items()}


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if name.endswith("A_log"):
        return torch.rand(shape, generator=generator)
    noise = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1 + 0.1 * noise
    if name.endswith("conv1d.weight"):
        return noise * 0.5
    if name.endswith("e_score_correction_bias"):
        return 0.1 * noise
    if name.endswith(("dt_bias", "embed_tokens.weight")):
        return noise
    return noise * shape[1] ** -0.5
