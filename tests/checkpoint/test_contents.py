"""What a checkpoint dictionary must hold, and every way in which its tensors can differ from its configuration."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from archives import edit_records, plain_pickle
from checkpoints import checkpoint, mini_config, mk
from findings import Edit, problems

from kimik3_cli.engine.checkpoint.contents import common_prefix, read_contents
from kimik3_cli.engine.checkpoint.inspection import inspect_checkpoint
from kimik3_cli.engine.checkpoint.load import load_checkpoint_model
from kimik3_cli.errors import CheckpointError, ConfigError


def refusal(content: object, path: Path, error: type[CheckpointError] = CheckpointError) -> str:
    """Save anything at all and return the one line with which reading, inspecting and loading refuse it."""
    torch.save(content, path)
    messages = set()
    for read in (read_contents, inspect_checkpoint, load_checkpoint_model):
        with pytest.raises(error) as caught:
            read(path)
        messages.add(str(caught.value))
    (message,) = messages
    assert message.isprintable()
    assert message.startswith(f"{path} ({path.stat().st_size} bytes)")
    return message


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ([1, 2], "holds a list, not a checkpoint dictionary"),
        (torch.ones(2, 3), "holds a float32 [2, 3], not a checkpoint dictionary"),
        ({}, "has no format_version"),
        ({"model": {}, "step": 3}, "has no format_version"),
        ({"a.weight": torch.ones(2), "b.weight": torch.ones(3)}, "is a bare state dict of 2 tensors"),
        ({"format_version": 7, "model": {}}, "has no model_config"),
        ({"format_version": 7, "model_config": {}}, "has no model;"),
        ({"format_version": 7, "model_config": [1], "model": {}}, "has a list as model_config"),
        ({"format_version": 7, "model_config": {}, "model": torch.ones(1)}, "has a float32 [1] as model;"),
    ],
)
def test_top_level(content: object, what: str, tmp_path: Path) -> None:
    message = refusal(content, tmp_path / "a.pt")
    assert what in message
    assert "save_checkpoint" in message or "must be a dictionary" in message


@pytest.mark.parametrize("version", [6, 8, True, 7.0, "7", None, [7], -(2**70)])
def test_other_format_versions(version: object, tmp_path: Path) -> None:
    message = refusal({**checkpoint(mini_config()), "format_version": version}, tmp_path / "a.pt")
    assert "has format_version" in message
    assert "kimik3 reads 7" in message
    assert "a list" in message if isinstance(version, list) else "a NoneType" in message or repr(version) in message


def test_long_values_are_cut(tmp_path: Path) -> None:
    message = refusal({**checkpoint(mini_config()), "format_version": "7\n" * 5000}, tmp_path / "a.pt")
    assert len(message) < 600


def nested(depth: int) -> list[Any]:
    held: list[Any] = []
    for _ in range(depth):
        held = [held]
    return held


def doubled(times: int) -> list[Any]:
    held: list[Any] = [1]
    for _ in range(times):
        held = [held, held]
    return held


def endless() -> list[Any]:
    held: list[Any] = []
    held.append(held)
    return held


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("hidden_size", -1, "hidden_size is -1"),
        ("hidden_sise", 32, "hidden_sise is not a key"),
        ("a\nb", 32, "a\\nb is not a key"),
        (7, 32, "model_config has a int as key"),
        ("rope_scaling", nested(20), "nested deeper than"),
        ("rope_scaling", nested(200), "nested deeper than"),
        ("rope_scaling", endless(), "nested deeper than"),
        ("vocab_size", doubled(40), "nested deeper than"),
        ("vocab_size", [[1] * 1000] * 200, "has more than 100000 values"),
        ("vocab_size", torch.ones(3), "vocab_size is TensorRef"),
        ("vocab_size", list(range(5000)), "vocab_size is [0, 1, 2"),
        ("num_experts", 10**9, "are not supported"),
    ],
)
def test_configuration(key: object, value: object, what: str, tmp_path: Path) -> None:
    config = {**mini_config(), key: value}
    message = refusal({**checkpoint(mini_config()), "model_config": config}, tmp_path / "a.pt", ConfigError)
    assert what in message
    assert len(message) < 5000


def test_nested_configuration_keys_that_are_no_strings(tmp_path: Path) -> None:
    config = mini_config(lin={7: 1})
    assert "linear_attn_config" in refusal(
        {**checkpoint(mini_config()), "model_config": config}, tmp_path / "a.pt", ConfigError
    )


@pytest.mark.parametrize(
    "entry", ["gpt2", {}, {"revision": None}, {"name_or_path": 3}, {"name_or_path": "x", "revision": 3}]
)
def test_tokenizer_entries_that_are_wrong(entry: object, tmp_path: Path) -> None:
    assert "tokenizer entry" in refusal({**checkpoint(mini_config()), "tokenizer": entry}, tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("entry", "read"),
    [
        (None, None),
        ({"name_or_path": "x"}, {"name_or_path": "x", "revision": None}),
        ({"name_or_path": "x", "revision": "main"}, {"name_or_path": "x", "revision": "main"}),
    ],
)
def test_tokenizer_entries(entry: object, read: object, tmp_path: Path) -> None:
    mk(tmp_path / "a.pt", edit=lambda made: made.update(tokenizer=entry))
    assert load_checkpoint_model(tmp_path / "a.pt")[1].tokenizer == read


@pytest.mark.parametrize(
    ("state", "step"), [({}, None), ({"step": 12}, 12), ({"step": 0}, 0), ({"step": True}, None), ({"step": 1.5}, None)]
)
def test_step(state: dict[str, Any], step: int | None, tmp_path: Path) -> None:
    mk(tmp_path / "a.pt", edit=lambda made: made.update(state))
    assert read_contents(tmp_path / "a.pt").step == step
    assert load_checkpoint_model(tmp_path / "a.pt")[1].step == step


def test_all_problems_in_one_go(tmp_path: Path) -> None:
    def edit(made: dict[str, Any]) -> None:
        model = made["model"]
        del model["norm.weight"], model["layers.1.self_attn.A_log"]
        model["layers.0.mlp.up_proj.weight"] = torch.ones(3, 4)
        model["lm_head.weight"] = model["lm_head.weight"].to(torch.int64)
        model["embed_tokens.weight"] = torch.ones(5, dtype=torch.complex64)
        model["layers.4.mlp.bias"] = torch.ones(2)

    found = problems(tmp_path / "a.pt", edit)
    assert {(kind, name) for kind, name, _ in found} == {
        ("missing", "norm.weight"),
        ("missing", "layers.1.self_attn.A_log"),
        ("shape", "layers.0.mlp.up_proj.weight"),
        ("dtype", "lm_head.weight"),
        ("shape", "embed_tokens.weight"),
        ("dtype", "embed_tokens.weight"),
        ("unexpected", "layers.4.mlp.bias"),
    }
    assert len(found) == 7
    messages = {name: message for _, name, message in found}
    assert "has shape [3, 4]; the configuration asks for [48, 32]" in messages["layers.0.mlp.up_proj.weight"]
    assert "stored as int64; store weights as float32" in messages["lm_head.weight"]


def test_more_problems_than_a_line_holds(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    made = checkpoint(mini_config())
    torch.save({**made, "model": {}}, path)
    assert len(inspect_checkpoint(path).problems) == len(made["model"])
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint_model(path)
    message = str(caught.value)
    assert message.count("is missing") == 20
    assert f"and {len(made['model']) - 20} more, which kimik3 inspect-checkpoint lists" in message


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn])
def test_dtypes_that_are_no_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    def edit(made: dict[str, Any]) -> None:
        made["model"]["norm.weight"] = made["model"]["norm.weight"].to(dtype)

    ((kind, name, message),) = problems(tmp_path / "a.pt", edit)
    assert (kind, name) == ("dtype", "norm.weight")
    assert str(dtype).removeprefix("torch.") in message


@pytest.mark.parametrize(
    ("entry", "what"),
    [(3, "a int"), ([torch.ones(2)], "a list"), (torch.eye(32).to_sparse(), "a sparse tensor"), (None, "a NoneType")],
)
def test_entries_that_are_no_tensors(entry: object, what: str, tmp_path: Path) -> None:
    def edit(made: dict[str, Any]) -> None:
        made["model"]["norm.weight"] = entry

    ((kind, name, message),) = problems(tmp_path / "a.pt", edit)
    assert (kind, name) == ("dtype", "norm.weight")
    assert f"is {what}; store it as a dense tensor" in message


@pytest.mark.parametrize("name", ["_extra_state", "layers.0.self_attn.rotary.inv_freq", "a\nb\x1b[31m", "x" * 1000, 7])
def test_unexpected_names(name: object, tmp_path: Path) -> None:
    ((kind, shown, message),) = problems(tmp_path / "a.pt", lambda made: made["model"].update({name: torch.ones(2)}))
    assert kind == "unexpected"
    assert shown.isprintable()
    assert len(message) < 400
    assert "float32 [2]" in message


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module.", "module." * 3])
def test_common_prefix_is_stripped_and_named(prefix: str, tmp_path: Path) -> None:
    def edit(made: dict[str, Any]) -> None:
        made["model"] = OrderedDict((prefix + name, tensor) for name, tensor in made["model"].items())

    assert problems(tmp_path / "a.pt", edit) == []
    mk(tmp_path / "plain.pt")
    model, metadata = load_checkpoint_model(tmp_path / "a.pt")
    plain, plain_metadata = load_checkpoint_model(tmp_path / "plain.pt")
    ids = torch.tensor([[3, 17, 41, 8]])
    assert torch.equal(model(ids), plain(ids))
    assert (metadata.stripped_prefix, plain_metadata.stripped_prefix) == (prefix, "")
    result = inspect_checkpoint(tmp_path / "a.pt", tensors=True)
    assert result.stripped_prefix == prefix
    assert all(tensor.name.startswith(prefix) for tensor in result.tensors)


def test_prefix_that_not_all_names_carry(tmp_path: Path) -> None:
    def edit(made: dict[str, Any]) -> None:
        made["model"]["module.norm.weight"] = made["model"].pop("norm.weight")

    found = problems(tmp_path / "a.pt", edit)
    assert [(kind, name) for kind, name, _ in found] == [
        ("missing", "norm.weight"),
        ("unexpected", "module.norm.weight"),
    ]


def test_common_prefix_of_odd_names() -> None:
    assert common_prefix([]) == ""
    assert common_prefix(["module.", "module.module."]) == "module."
    assert common_prefix(["modules.a", "module.b"]) == ""


def replace_decays(change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    def edit(made: dict[str, Any]) -> None:
        for name, tensor in made["model"].items():
            if name.endswith("A_log"):
                made["model"][name] = change(tensor)

    return edit


def padded(tensor: torch.Tensor) -> torch.Tensor:
    """As released files do: 128 entries, of which the first H are real."""
    return torch.cat([tensor, torch.full((128 - len(tensor),), float("nan"))])


DECAY_FORMS = {
    "padded": padded,
    "transformers": lambda tensor: tensor.view(1, 1, -1, 1),
    "padded bf16": lambda tensor: padded(tensor).bfloat16(),
    "strided": lambda tensor: torch.stack([tensor, tensor + 1], dim=1)[:, 0],
    "transformers, strided": lambda tensor: torch.stack([tensor, tensor + 1], dim=1)[:, 0].view(1, 1, -1, 1),
}


@pytest.mark.parametrize("change", DECAY_FORMS.values(), ids=DECAY_FORMS)
def test_forms_of_the_decay(change: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    assert problems(path, replace_decays(change)) == []
    made = checkpoint(mini_config())["model"]
    model, metadata = load_checkpoint_model(path)
    result = inspect_checkpoint(path, deep=True)
    assert metadata.parameters == result.parameters.total == sum(use.parameters for use in result.dtypes) == 56412
    assert result.problems == []
    name = "layers.1.self_attn.A_log"
    stored = change(made[name]).reshape(-1)[:2].float()
    assert torch.equal(model.state_dict()[name], stored)


@pytest.mark.parametrize("shape", [(1,), (2, 1), (1, 2), (1, 1, 3, 1), (1, 1, 2), ()])
def test_decays_of_the_wrong_shape(shape: tuple[int, ...], tmp_path: Path) -> None:
    found = problems(tmp_path / "a.pt", replace_decays(lambda _: torch.ones(shape)))
    assert [kind for kind, _, _ in found] == ["shape"] * 4


def test_other_parameters_must_not_be_padded(tmp_path: Path) -> None:
    def edit(made: dict[str, Any]) -> None:
        made["model"]["layers.0.self_attn.dt_bias"] = torch.ones(128)

    ((kind, _, message),) = problems(tmp_path / "a.pt", edit)
    assert kind == "shape"
    assert "has shape [128]; the configuration asks for [32]" in message


def test_model_that_holds_itself(tmp_path: Path) -> None:
    def edit(made: dict[str, Any]) -> None:
        made["model"]["again"] = made["model"]

    ((kind, name, _),) = problems(tmp_path / "a.pt", edit)
    assert (kind, name) == ("unexpected", "again")


def test_foreign_type_in_the_model(tmp_path: Path) -> None:
    content = checkpoint(mini_config())
    content["model"]["norm.weight"] = numpy.ones(32, dtype="float32")
    assert "numpy.ndarray under 'model.norm.weight'" in refusal(content, tmp_path / "a.pt")


def test_pickle_without_tensors(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    mk(path)
    edit_records(path, {"data.pkl": plain_pickle({"format_version": 7, "model_config": mini_config(), "model": {}})})
    assert {problem.kind for problem in inspect_checkpoint(path).problems} == {"missing"}
