"""Attention residuals, routing and position-free attention, each where other engines went wrong."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ids, mk
from comparison import assert_matches_oracle, load, relative_difference

from kimik3_cli.engine.generation import next_token_logits

PROMPT = ids(60)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 5, 6, 12, None])
def test_residual_blocks(block_size: int | None, tied: bool, tmp_path: Path) -> None:
    made = mk(tmp_path / "blocks.pt", {"attn_res_block_size": block_size, "tie_word_embeddings": tied})
    assert_matches_oracle(tmp_path / "blocks.pt", made, PROMPT)


def test_residual_blocks_mix_with_the_configured_epsilon(tmp_path: Path) -> None:
    """A mix over tiny values shows which epsilon its keys are normalised with."""

    def shrink(made: dict[str, Any]) -> None:
        made["model"]["embed_tokens.weight"] *= 1e-3

    made = mk(tmp_path / "tiny.pt", {"attn_res_block_size": 1}, shrink)
    assert_matches_oracle(tmp_path / "tiny.pt", made, PROMPT)


def test_layer_0_never_uses_its_attention_mix(tmp_path: Path) -> None:
    def edit(made: dict[str, Any]) -> None:
        made["model"]["layers.0.self_attention_res_proj.weight"].fill_(100.0)

    mk(tmp_path / "plain.pt"), mk(tmp_path / "edited.pt", edit=edit)
    logits = [next_token_logits(load(tmp_path / name), PROMPT) for name in ("plain.pt", "edited.pt")]
    assert torch.equal(*logits)


def bias_strongly(centre: float) -> Any:
    """Selection biases of +-2 around `centre`: they decide the choice and would swamp the weights."""

    def edit(made: dict[str, Any]) -> None:
        for name, tensor in made["model"].items():
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(centre + 2.0 * tensor.sign())

    return edit


UNGROUPED = [{"num_experts_per_token": count} for count in (1, 2, 6)]
GROUPED = [
    {"num_expert_group": groups, "topk_group": kept, "num_experts_per_token": count}
    for groups, kept, count in ((3, 2, 1), (3, 2, 3), (3, 2, 4), (3, 1, 2), (2, 1, 3))
]


@pytest.mark.parametrize("choice", UNGROUPED + GROUPED, ids=str)
@pytest.mark.parametrize("centre", [0.0, -4.0])
@pytest.mark.parametrize(("function", "renormalise"), list(product(["sigmoid", "softmax"], [True, False])))
@pytest.mark.parametrize("norm", [True, False])
def test_routing(
    choice: dict[str, int], centre: float, function: str, renormalise: bool, norm: bool, tmp_path: Path
) -> None:
    config = {
        **choice,
        "routed_scaling_factor": 2.446,
        "moe_router_activation_func": function,
        "moe_renormalize": renormalise,
        "latent_moe_use_norm": norm,
    }
    made = mk(tmp_path / "routing.pt", config, bias_strongly(centre))
    assert_matches_oracle(tmp_path / "routing.pt", made, ids(24))


def test_only_the_chosen_experts_are_computed(tmp_path: Path) -> None:
    def exclude_all_but_two(made: dict[str, Any]) -> None:
        for name, tensor in made["model"].items():
            if name.endswith("e_score_correction_bias"):
                tensor[:] = torch.tensor([-9.0, 9, -9, -9, 9, -9])

    mk(tmp_path / "two.pt", edit=exclude_all_but_two)
    model, computed = load(tmp_path / "two.pt"), set()
    for name, module in model.named_modules():
        product = name.rpartition(".experts.")[2]  # such as 4.w1
        if product.endswith(("w1", "w2", "w3")):
            module.register_forward_hook(lambda _module, inputs, _output, p=product: computed.add((p, len(inputs[0]))))
    with torch.no_grad():
        model(torch.tensor([PROMPT]))
    assert computed == {(f"{expert}.{w}", len(PROMPT)) for expert in (1, 4) for w in ("w1", "w2", "w3")}


ONE_MLA_LAYER = {"num_hidden_layers": 1, "num_experts": None, "attn_res_block_size": None}
ONLY_MLA = {"kda_layers": [], "full_attn_layers": [1]}


def test_attention_has_no_positions(tmp_path: Path) -> None:
    mk(tmp_path / "m1.pt", ONE_MLA_LAYER, lin=ONLY_MLA)
    model, first = load(tmp_path / "m1.pt"), [3, 17, 41, 8, 22, 5, 60]
    logits = next_token_logits(model, [*first, 33])
    for order in (first[::-1], sorted(first), first[3:] + first[:3]):
        assert relative_difference(next_token_logits(model, [*order, 33]), logits) <= 1e-6
    assert relative_difference(next_token_logits(model, [33, *first]), logits) > 0.01


def test_rope_settings_change_nothing(tmp_path: Path) -> None:
    mk(tmp_path / "plain.pt", ONE_MLA_LAYER, lin=ONLY_MLA)
    mk(tmp_path / "rope.pt", {**ONE_MLA_LAYER, "rope_theta": 10000.0}, lin=ONLY_MLA)
    logits = [next_token_logits(load(tmp_path / name), PROMPT) for name in ("plain.pt", "rope.pt")]
    assert torch.equal(*logits)
