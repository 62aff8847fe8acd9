"""Where weights lie decides speed only: joined products equal separate ones, and loading lays them side by side."""

from pathlib import Path

import pytest
import torch
from checkpoints import checkpoint, ids, mini_config, mk
from comparison import load
from hypothesis import given
from hypothesis import strategies as st
from strategies import REPEATABLE
from torch import Tensor

from kimik3_cli.engine.checkpoint.load import load_checkpoint_model
from kimik3_cli.engine.generation import next_token_logits
from kimik3_cli.engine.model import layout
from kimik3_cli.engine.model.layout import joined, place
from kimik3_cli.engine.model.step_parts import project_all


@REPEATABLE
@given(
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    columns=st.integers(1, 9),
    is_large=st.booleans(),
    odd_one=st.integers(0, 4),
)
def test_joined_products_equal_separate_ones(rows: list[int], columns: int, is_large: bool, odd_one: int) -> None:
    """Any split into matrices, either layout, one of them perhaps somewhere else in memory."""
    together = torch.randn(columns, sum(rows)).t() if is_large else torch.randn(sum(rows), columns)
    weights: list[Tensor] = list(together.split(rows))
    if odd_one < len(weights):
        weights[odd_one] = weights[odd_one].clone()
    x = torch.randn(2, columns)
    expected = torch.cat([x @ weight.t() for weight in weights], dim=-1)
    torch.testing.assert_close(project_all(x, joined(weights)), expected)


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
        "layers.0.self_attn.k_proj.weight": (4, 8),
        "layers.1.self_attn.q_proj.weight": (4, 8),  # alone in its module
        "layers.0.self_attn.o_proj.weight": (8, 4),
        "layers.0.block_sparse_moe.experts.0.w1.weight": (4, 8),
        "norm.weight": (8,),
        "lm_head.weight": (2, layout.LARGE),
    }
    placed = place({name: (shape, torch.float32) for name, shape in shapes.items()})
    assert set(placed) == {f"layers.0.self_attn.{x}_proj.weight" for x in "qk"} | {"lm_head.weight"}
    assert all(placed[name].shape == shapes[name] for name in placed)


@pytest.mark.parametrize("large", [1, layout.LARGE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_lays_projections_side_by_side(
    large: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = checkpoint(mini_config())
    made["model"] = {name: tensor.to(dtype) for name, tensor in made["model"].items()}
    torch.save(made, tmp_path / "mini.pt")
    monkeypatch.setattr(layout, "LARGE", large)
    monkeypatch.setattr("kimik3_cli.engine.checkpoint.reading.ROWS_NUMBERS", 7)
    model, _ = load_checkpoint_model(tmp_path / "mini.pt")
    kda, mla = model.layers[0].self_attn, model.layers[3].self_attn
    for group in (
        [kda.q_proj, kda.k_proj, kda.v_proj, kda.f_a_proj, kda.b_proj, kda.g_proj],
        [mla.q_a_proj, mla.kv_a_proj_with_mqa, mla.g_proj],
        [model.layers[0].mlp.gate_proj, model.layers[0].mlp.up_proj],
    ):
        assert len(joined([projection.weight for projection in group])) == 1
    for name, tensor in model.state_dict().items():
        assert tensor.equal(made["model"][name].float()), name


def test_the_layout_does_not_change_the_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mk(tmp_path / "mini.pt")
    expected = next_token_logits(load(tmp_path / "mini.pt"), ids(40))
    monkeypatch.setattr(layout, "LARGE", 1)
    torch.testing.assert_close(next_token_logits(load(tmp_path / "mini.pt"), ids(40)), expected, rtol=1e-5, atol=1e-6)
