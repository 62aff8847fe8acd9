"""Fresh random models of every kind of configuration against the float64 model, from a file to the logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import checkpoint, ids, mini_config
from comparison import CLEAR_ROUTING, assert_matches_run, load
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import oracle_run
from strategies import REPEATABLE, model_configs

from kimik3_cli.engine.config import KimiK3Config

# How a file may hold the [H] values of A_log.
A_LOG_FORMS = {
    "plain": lambda a_log: a_log,
    "padded": lambda a_log: torch.cat([a_log, torch.full((128 - len(a_log),), 9.0)]),
    "four axes": lambda a_log: a_log.view(1, 1, -1, 1),
}


def store(made: dict[str, Any], dtype: torch.dtype, a_log_form: str) -> None:
    """Change how a file holds its weights."""
    for name, tensor in made["model"].items():
        shaped = A_LOG_FORMS[a_log_form](tensor) if name.endswith("A_log") else tensor
        made["model"][name] = shaped.to(dtype)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("random")


@settings(REPEATABLE, max_examples=200)
@given(
    config=model_configs(),
    length=st.integers(1, 150),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    a_log_form=st.sampled_from(sorted(A_LOG_FORMS)),
    seed=st.integers(0, 99),
)
def test_any_configuration(
    config: dict[str, Any], length: int, dtype: torch.dtype, a_log_form: str, seed: int, folder: Path
) -> None:
    made = checkpoint(config, seed)
    store(made, dtype, a_log_form)
    token_ids = ids(length, config["vocab_size"], seed)
    run = oracle_run(made, token_ids)
    assume(run.routing_gap > CLEAR_ROUTING)
    torch.save(made, folder / "any.pt")
    assert_matches_run(load(folder / "any.pt"), token_ids, run)


# One whole model of each family, so that a failure names what broke.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mini": ({}, {}),
    "kda only": ({}, {"kda_layers": [1, 2, 3, 4, 5], "full_attn_layers": []}),
    "full attention only": ({}, {"kda_layers": [], "full_attn_layers": [1, 2, 3, 4, 5]}),
    "low-rank gate": ({}, {"use_full_rank_gate": False}),
    "softplus gate": ({}, {"gate_lower_bound": None}),
    "no query latent": ({"q_lora_rank": None}, {}),
    "no MLA gate": ({"mla_use_output_gate": False}, {}),
    "dense": ({"num_experts": None, "num_experts_per_token": None, "moe_intermediate_size": None}, {}),
    "no latent": ({"routed_expert_hidden_size": None}, {}),
    "no latent norm": ({"latent_moe_use_norm": False}, {}),
    "no shared experts": ({"num_shared_experts": 0}, {}),
    "plain residuals": ({"attn_res_block_size": None}, {}),
    "tied": ({"tie_word_embeddings": True}, {}),
    "kimi linear": (
        {
            "hidden_act": "silu",
            "attn_res_block_size": None,
            "q_lora_rank": None,
            "mla_use_output_gate": False,
            "routed_expert_hidden_size": None,
        },
        {"gate_lower_bound": None, "use_full_rank_gate": False},
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    made = checkpoint(mini_config(*FAMILIES[family]))
    torch.save(made, tmp_path / "family.pt")
    token_ids = ids(100)
    run = oracle_run(made, token_ids)
    assert run.routing_gap > CLEAR_ROUTING
    assert_matches_run(load(tmp_path / "family.pt"), token_ids, run)


@REPEATABLE
@given(config=model_configs())
def test_configurations_survive_a_round_trip(config: dict[str, Any]) -> None:
    read = KimiK3Config.from_dict(config)
    assert KimiK3Config.from_dict(read.to_dict()) == read
