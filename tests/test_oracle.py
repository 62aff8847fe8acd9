"""The tests' own float64 model against the reference data: it must be right before anything is compared with it."""

import oracle
import pytest
import reference_data
import torch
from oracle import oracle_run

PRINTED_DIGITS = 1e-8
"""The reference logits are printed with about ten digits."""


@pytest.mark.parametrize(("name", "index"), reference_data.prompts())
def test_whole_models(name: str, index: int) -> None:
    prompt = reference_data.case(name)["prompts"][index]
    checkpoint = torch.load(reference_data.case_path(name), weights_only=True)
    run = oracle_run(checkpoint, prompt["token_ids"] + prompt["greedy_token_ids"])
    last = prompt["length"] - 1
    reference = torch.tensor(prompt["next_token_logits"], dtype=torch.float64)
    reference_data.assert_within(run.logits[last], reference, PRINTED_DIGITS)
    assert run.logits[last:-1].argmax(-1).tolist() == prompt["greedy_token_ids"]
    assert run.routing_gap > 1e-4
    if "argmax_per_position" in prompt:
        assert run.logits[: last + 1].argmax(-1).tolist() == prompt["argmax_per_position"]


def test_recurrence() -> None:
    data = reference_data.operator("kda_recur8")
    scale = reference_data.operators()["kda_recur8"]["q_scale"]
    q, k, v, alpha, beta = (data[name][None].double() for name in ("q", "k", "v", "alpha", "beta"))
    out, state = oracle.kda_recurrence_f64(q * scale, k, v, alpha.log(), beta)
    reference_data.assert_within(out[0], data["out"], 1e-6)
    reference_data.assert_within(state[0], data["state_out"], 1e-6)


def test_convolution_and_its_tail() -> None:
    data = reference_data.operator("shortconv")
    out, tail = oracle.short_conv(data["in"][0].double(), data["weight"].double())
    reference_data.assert_within(out, data["out"][0], 1e-6)
    assert torch.equal(tail, data["state_after"][0].double())


def test_residual_mix() -> None:
    data = {name: tensor.double() for name, tensor in reference_data.operator("attnres").items()}
    sources = [*data["block_residual"].unbind(1), data["prefix_sum"]]
    out = oracle.residual_mix(sources, data["res_norm.weight"], data["res_proj.weight"], 1e-5)
    reference_data.assert_within(out, data["out"], 1e-6)
