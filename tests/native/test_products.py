"""Products of one token and its mixture of experts, compiled: float64 sums, and the experts that the router chooses."""

from typing import Any

import pytest
import torch
from checkpoints import mini_config
from hypothesis import given, settings
from hypothesis import strategies as st
from native.operands import assert_rows_close, numbers, untouched
from strategies import REPEATABLE
from torch import Tensor

from kimik3_cli.engine.config import KimiK3Config
from kimik3_cli.engine.model.ffn import Router
from kimik3_cli.engine.model.parts import make_activation
from kimik3_cli.engine.native.operations import Products, RoutedExperts

pytestmark = pytest.mark.usefixtures("threads")

Weights = tuple[Tensor, Tensor, Tensor]


@REPEATABLE
@given(
    rows=st.lists(st.one_of(st.integers(1, 9), st.sampled_from([64, 301])), min_size=1, max_size=6),
    size=st.one_of(st.integers(1, 100), st.sampled_from([512, 1027])),
    added=st.booleans(),
    offset=st.integers(0, 3),
)
def test_products(rows: list[int], size: int, added: bool, offset: int) -> None:
    """Weights of any heights, which begin anywhere in memory; odd and even numbers of rows."""
    flat = numbers(sum(rows) * size + offset)[offset:]
    weights = [part.view(-1, size) for part in flat.split([count * size for count in rows])]
    x, total = numbers(1, size, seed=1), numbers(1, sum(rows), seed=2) if added else None
    expected = torch.cat([x.double() @ weight.double().t() for weight in weights], dim=-1)
    out = untouched(1, sum(rows))
    Products(weights, out)(x, total)
    assert_rows_close(out, expected if total is None else expected + total.double())


def test_an_infinite_and_a_missing_number_come_through() -> None:
    weight, x, out = torch.ones(3, 40), torch.ones(1, 40), untouched(1, 3)
    weight[1, 39], weight[2, 0] = float("nan"), float("inf")
    Products([weight], out)(x)
    assert out[0, 0] == 40
    assert out[0, 1].isnan()
    assert out[0, 2] == float("inf")


def router_of(keys: dict[str, Any], bias: Tensor) -> Router:
    router = Router(KimiK3Config.model_validate(mini_config(keys)))
    router.e_score_correction_bias.data = bias
    return router


def expected_sum(router: Router, weights: list[Weights], activation: Any, logits: Tensor, x: Tensor) -> Tensor:
    """What the experts that the router's own code chooses add up to, in float64 from its weights on: [1,D]."""
    experts, shares = router.choose(logits)
    total = torch.zeros(1, x.shape[1], dtype=torch.float64)
    for expert, share in zip(experts[0].tolist(), shares[0].double(), strict=True):
        w1, w3, w2 = (weight.double() for weight in weights[expert])
        total += share * (activation.formula(x.double() @ w1.t(), x.double() @ w3.t()) @ w2.t())
    return total


@settings(REPEATABLE, max_examples=150)
@given(
    groups=st.integers(1, 4),
    group_size=st.integers(2, 5),
    data=st.data(),
    softmax=st.booleans(),
    renormalise=st.booleans(),
    hidden_act=st.sampled_from(["situ", "silu"]),
    sizes=st.sampled_from([(1, 1), (7, 5), (33, 20), (64, 301)]),
    ties=st.booleans(),
    spread=st.sampled_from([0.1, 3.0, 60.0]),
)
@torch.no_grad()
def test_mixture(
    groups: int,
    group_size: int,
    data: st.DataObject,
    softmax: bool,
    renormalise: bool,
    hidden_act: str,
    sizes: tuple[int, int],
    ties: bool,
    spread: float,
) -> None:
    """The choice of every router, with ties, of which the first expert wins; and the sum of what it chose."""
    count, (size, width) = groups * group_size, sizes
    kept = data.draw(st.integers(1, groups))
    keys = {
        "num_experts": count,
        "num_experts_per_token": data.draw(st.integers(1, kept * group_size)),
        "num_expert_group": groups,
        "topk_group": kept,
        "moe_router_activation_func": "softmax" if softmax else "sigmoid",
        "moe_renormalize": renormalise,
        "routed_scaling_factor": 2.446,
        "hidden_act": hidden_act,
    }
    logits = numbers(1, count, seed=3, scale=spread)
    router = router_of(keys, numbers(count, seed=4))
    if ties:
        logits, router.e_score_correction_bias.data = logits.round().sign(), torch.zeros(count)
    activation = make_activation(KimiK3Config.model_validate(mini_config(keys)))
    weights = [
        (numbers(width, size, seed=9 * n), numbers(width, size, seed=9 * n + 1), numbers(size, width, seed=9 * n + 2))
        for n in range(count)
    ]
    x, total, out = numbers(1, size, seed=5), numbers(1, size, seed=6), untouched(1, size)
    RoutedExperts(weights, router.routing(), activation.caps, out)(logits, x, total)
    assert_rows_close(out, total.double() + expected_sum(router, weights, activation, logits, x), 1e-4)


@torch.no_grad()
def test_a_ruled_out_expert_is_never_chosen() -> None:
    """A bias of -inf, as in models some of whose experts are switched off."""
    bias = torch.zeros(6)
    bias[[0, 3]] = float("-inf")
    router = router_of({"num_experts": 6, "num_experts_per_token": 3, "routed_scaling_factor": 1.0}, bias)
    weights = [(torch.ones(2, 4), torch.ones(2, 4), torch.full((4, 2), 10.0**n)) for n in range(6)]
    activation = make_activation(KimiK3Config.model_validate(mini_config()))
    logits, x, out = torch.tensor([[9.0, 1, 2, 8, 3, 0]]), numbers(1, 4), untouched(1, 4)
    RoutedExperts(weights, router.routing(), activation.caps, out)(logits, x, torch.zeros(1, 4))
    assert_rows_close(out, expected_sum(router, weights, activation, logits, x))


@torch.no_grad()
@pytest.mark.parametrize("where", ["logits", "x"])
def test_nan_reaches_the_result(where: str) -> None:
    router = router_of({"num_experts": 4, "num_experts_per_token": 2}, torch.zeros(4))
    weights = [(numbers(3, 5), numbers(3, 5), numbers(5, 3)) for _ in range(4)]
    activation = make_activation(KimiK3Config.model_validate(mini_config()))
    logits, x, out = numbers(1, 4), numbers(1, 5), untouched(1, 5).zero_()
    (logits if where == "logits" else x)[0, 2] = float("nan")
    RoutedExperts(weights, router.routing(), activation.caps, out)(logits, x, torch.zeros(1, 5))
    assert out.isnan().all()
