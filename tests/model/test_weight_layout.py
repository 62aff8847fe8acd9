"""Where weights lie decides speed only: products of one input equal separate ones, and loading keeps every value."""

from pathlib import Path

import pytest
import torch
from checkpoints import checkpoint, mini_config
from hypothesis import given
from hypothesis import strategies as st
from strategies import REPEATABLE
from torch import Tensor

from kimik3_cli.engine.checkpoint.load import load_checkpoint_model
from kimik3_cli.engine.model.layout import joined, place
from kimik3_cli.engine.model.step_parts import Projections


@REPEATABLE
@given(
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    columns=st.integers(1, 40),
    batch=st.integers(1, 2),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    odd_one=st.integers(0, 4),
)
def test_products_of_one_input(rows: list[int], columns: int, batch: int, dtype: torch.dtype, odd_one: int) -> None:
    """Any split into matrices, one of them perhaps somewhere else in memory, equals one product a matrix."""
    weights: list[Tensor] = list(torch.randn(sum(rows), columns, dtype=dtype).split(rows))
    if odd_one < len(weights):
        weights[odd_one] = weights[odd_one].clone()
    x = torch.randn(batch, columns)
    exact = torch.cat([x.to(dtype).double() @ weight.double().t() for weight in weights], dim=-1)
    bound = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(Projections(weights, batch)(x).double(), exact, rtol=bound, atol=bound)


def test_neighbours_of_other_layouts_are_not_joined() -> None:
    """The second continues the first in memory, but is of another width, another dtype, or another storage."""
    flat = torch.randn(40)
    assert len(joined([flat[:20].view(4, 5), flat[20:].view(2, 10)])) == 2
    assert len(joined([flat[:20].view(4, 5), flat[20:].view(torch.int32).view(4, 5)])) == 2
    assert len(joined([flat[:20].view(4, 5), flat[20:].clone().view(4, 5)])) == 2
    assert len(joined([flat[:20].view(4, 5), flat[25:].view(3, 5)])) == 2
    assert len(joined([flat[:20].view(4, 5), flat[20:].view(4, 5)])) == 1


def test_only_what_gains_is_placed() -> None:
    shapes = {
        "layers.0.self_attn.q_proj.weight": (4, 8),
        "layers.0.self_attn.k_proj.weight": (5, 8),
        "layers.1.self_attn.q_proj.weight": (4, 8),  # alone in its module
        "layers.0.self_attn.o_proj.weight": (8, 4),
        "layers.0.block_sparse_moe.experts.0.w1.weight": (4, 8),
        "norm.weight": (8,),
    }
    placed = place({name: (shape, torch.float32) for name, shape in shapes.items()}, "cpu")
    assert list(placed) == [f"layers.0.self_attn.{x}_proj.weight" for x in "qk"]
    assert all(placed[name].shape == shapes[name] for name in placed)
    assert len(joined(list(placed.values()))) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_keeps_every_value(dtype: torch.dtype, tmp_path: Path) -> None:
    made = checkpoint(mini_config())
    made["model"] = {name: tensor.to(dtype) for name, tensor in made["model"].items()}
    torch.save(made, tmp_path / "mini.pt")
    model, _ = load_checkpoint_model(tmp_path / "mini.pt")
    for name, tensor in model.state_dict().items():
        assert tensor.equal(made["model"][name].float()), name
