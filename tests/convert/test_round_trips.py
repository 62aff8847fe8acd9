"""To a directory and back: the same configuration, key for key, and the same tensors, bit for bit."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from checkpoints import checkpoint, ids, mk
from comparison import SAME, assert_close
from conversions import KIMI_LINEAR, KIMI_LINEAR_LIN, config_of, convert, tensors_of
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import REPEATABLE, model_configs
from torch import Tensor

from kimik3_cli.engine import load_checkpoint_model, next_token_logits
from kimik3_cli.engine.config import KimiK3Config

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def loaded(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


def assert_same_tensors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


@settings(REPEATABLE, max_examples=40)
@given(model_configs(), st.data())
def test_any_model_comes_back_as_it_was(config: dict[str, Any], data: st.DataObject) -> None:
    made = checkpoint(config)
    for name, tensor in made["model"].items():
        made["model"][name] = tensor.to(data.draw(st.sampled_from(DTYPES), label=name))
    with TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(made, folder / "a.pt")
        there = convert(folder / "a.pt", folder / "a", max_shard_bytes=data.draw(st.sampled_from([300, 10**9])))
        back = convert(folder / "a", folder / "b.pt")
        found = loaded(folder / "b.pt")
        directory = tensors_of(folder / "a")
    assert found["format_version"] == 7
    assert found["model_config"] == KimiK3Config.from_dict(config).to_dict()
    assert_same_tensors(found["model"], made["model"])
    assert there.parameters == back.parameters
    assert there.tensors == len(directory)
    assert there.bytes == sum(tensor.nbytes for tensor in directory.values())


@pytest.mark.parametrize(("cfg", "lin"), [({}, {}), (KIMI_LINEAR, KIMI_LINEAR_LIN)], ids=["kimi_k3", "kimi_linear"])
def test_a_directory_comes_back_as_it_was(cfg: dict[str, Any], lin: dict[str, Any], tmp_path: Path) -> None:
    mk(tmp_path / "a.pt", cfg, lin=lin)
    first = convert(tmp_path / "a.pt", tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b.pt")
    second = convert(tmp_path / "b.pt", tmp_path / "b")
    assert first.files == second.files
    assert first.layout == second.layout


def test_not_a_number_and_infinity_travel_bit_for_bit(tmp_path: Path) -> None:
    def spoil(made: dict[str, Any]) -> None:
        made["model"]["norm.weight"][:3] = torch.tensor([float("nan"), float("inf"), -0.0])

    made = mk(tmp_path / "a.pt", edit=spoil)
    convert(tmp_path / "a.pt", tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b.pt")
    assert_same_tensors(loaded(tmp_path / "b.pt")["model"], made["model"])


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_the_prefix_of_a_wrapper_is_left_behind(prefix: str, tmp_path: Path) -> None:
    plain = mk(tmp_path / "a.pt")["model"]

    def wrap(made: dict[str, Any]) -> None:
        made["model"] = {prefix + name: tensor for name, tensor in made["model"].items()}

    mk(tmp_path / "wrapped.pt", edit=wrap)
    assert convert(tmp_path / "a.pt", tmp_path / "a").files == convert(tmp_path / "wrapped.pt", tmp_path / "b").files
    convert(tmp_path / "b", tmp_path / "b.pt")
    assert_same_tensors(loaded(tmp_path / "b.pt")["model"], plain)


def test_views_and_transposes_are_written_in_order(tmp_path: Path) -> None:
    def rearrange(made: dict[str, Any]) -> None:
        model = made["model"]
        model["embed_tokens.weight"] = model["embed_tokens.weight"].T.contiguous().T
        model["norm.weight"] = torch.cat([torch.zeros(5), model["norm.weight"]])[5:]

    made = mk(tmp_path / "a.pt", edit=rearrange)
    assert not made["model"]["embed_tokens.weight"].is_contiguous()
    convert(tmp_path / "a.pt", tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b.pt")
    assert_same_tensors(loaded(tmp_path / "b.pt")["model"], made["model"])


@pytest.mark.parametrize(
    "kept", [("embed_tokens.weight",), ("lm_head.weight",), ("embed_tokens.weight", "lm_head.weight")]
)
def test_a_tied_head_is_stored_once_in_a_file(kept: tuple[str, ...], tmp_path: Path) -> None:
    def keep(made: dict[str, Any]) -> None:
        table = made["model"].pop("embed_tokens.weight")
        made["model"] |= {name: table for name in kept}

    plain = mk(tmp_path / "plain.pt", {"tie_word_embeddings": True})
    mk(tmp_path / "a.pt", {"tie_word_embeddings": True}, keep)
    convert(tmp_path / "a.pt", tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b.pt")
    assert_same_tensors(loaded(tmp_path / "b.pt")["model"], plain["model"])
    assert loaded(tmp_path / "b.pt")["model_config"]["tie_word_embeddings"] is True


def test_logits_do_not_change(tmp_path: Path) -> None:
    mk(tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b.pt")
    logits = [next_token_logits(load_checkpoint_model(tmp_path / name)[0], ids(70)) for name in ("a.pt", "a", "b.pt")]
    assert_close(logits[1], logits[0], SAME)
    assert torch.equal(logits[0], logits[2])


def test_trainer_state_is_named_and_left_behind(tmp_path: Path) -> None:
    mk(tmp_path / "a.pt", edit=lambda made: made.update(step=3, optimizer={"m": torch.zeros(5)}))
    assert convert(tmp_path / "a.pt", tmp_path / "a").dropped == ["step", "optimizer"]
    assert convert(tmp_path / "a", tmp_path / "b.pt").dropped == []
    assert set(loaded(tmp_path / "b.pt")) == {"format_version", "model_config", "model"}


def test_the_ids_that_end_a_text_are_those_that_a_directory_ends_with(tmp_path: Path) -> None:
    """Published directories often name them in generation_config.json alone."""
    mk(tmp_path / "a.pt", {"eos_token_id": 5})
    convert(tmp_path / "a.pt", tmp_path / "a")
    (tmp_path / "a" / "generation_config.json").write_text('{"eos_token_id": [5, 9]}', encoding="utf-8")
    convert(tmp_path / "a", tmp_path / "b.pt")
    assert loaded(tmp_path / "b.pt")["model_config"]["eos_token_id"] == [5, 9]


def test_what_only_a_trainer_says_travels_in_an_object_of_its_own(tmp_path: Path) -> None:
    mk(tmp_path / "a.pt", {"kda_chunk_size": 32, "kda_backend": "fused"})
    convert(tmp_path / "a.pt", tmp_path / "a")
    assert config_of(tmp_path / "a")["kimik3"] == {"kda_chunk_size": 32, "kda_backend": "fused"}


@pytest.mark.parametrize("renormalize", [True, False])
def test_one_expert_a_token(renormalize: bool, tmp_path: Path) -> None:
    """transformers would renormalize its weight to 1, so it is told not to; the file says again what it said."""
    cfg = {**KIMI_LINEAR, "num_experts_per_token": 1, "moe_renormalize": renormalize}
    made = mk(tmp_path / "a.pt", cfg, lin=KIMI_LINEAR_LIN)
    convert(tmp_path / "a.pt", tmp_path / "a")
    assert config_of(tmp_path / "a")["moe_renormalize"] is False
    convert(tmp_path / "a", tmp_path / "b.pt")
    assert loaded(tmp_path / "b.pt")["model_config"] == KimiK3Config.from_dict(made["model_config"]).to_dict()


def test_keys_that_decide_nothing_are_named_and_left_behind(tmp_path: Path) -> None:
    mk(tmp_path / "a.pt", {"bos_token_id": 3, "rope_theta": 10000.0, "rope_scaling": None})
    assert convert(tmp_path / "a.pt", tmp_path / "a").dropped == ["bos_token_id", "rope_theta"]
    config = config_of(tmp_path / "a")
    config["text_config"]["initializer_range"] = 0.02
    (tmp_path / "a" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert convert(tmp_path / "a", tmp_path / "b.pt").dropped == ["initializer_range"]
