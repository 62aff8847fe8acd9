"""Wrong arguments from Python end in the documented errors, never in one from inside a library."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import mini_config, mk
from comparison import load
from torch import nn

from kimik3_cli.engine import KimiK3Config, next_token_logits, resolve_device, select_token
from kimik3_cli.engine.checkpoint.load import load_checkpoint_model
from kimik3_cli.engine.checkpoint.save import save_checkpoint
from kimik3_cli.engine.model.decoder import KimiK3
from kimik3_cli.errors import CheckpointError, ConfigError, RequestError

TOP_LEVEL = [key for key in mini_config() if key != "linear_attn_config"]
LINEAR = list(mini_config()["linear_attn_config"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> KimiK3:
    path = tmp_path_factory.mktemp("refusals") / "mini.pt"
    mk(path)
    return load(path)


@pytest.mark.parametrize("value", ["x", -7, 3.5, [1.5]], ids=repr)
@pytest.mark.parametrize("key", [*TOP_LEVEL, *LINEAR])
def test_a_wrong_value_is_refused_by_the_name_of_its_key(key: str, value: object) -> None:
    config = mini_config()
    (config if key in config else config["linear_attn_config"])[key] = value
    legal = (key, value) == ("gate_lower_bound", -7)
    if legal:
        assert KimiK3Config.from_dict(config).linear_attn_config.gate_lower_bound == -7
    else:
        with pytest.raises(ConfigError, match=rf"{key} (is|list)"):
            KimiK3Config.from_dict(config)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "max_seq_len"])
def test_a_missing_key_is_named(key: str) -> None:
    config = mini_config()
    del config[key]
    with pytest.raises(ConfigError, match=f"{key} is missing; it has no default"):
        KimiK3Config.from_dict(config)


@pytest.mark.parametrize("value", [64.0, True, "64", 48])
def test_a_chunk_size_is_one_of_five_integers(value: object) -> None:
    with pytest.raises(ConfigError, match="kda_chunk_size is "):
        KimiK3Config.from_dict({**mini_config(), "kda_chunk_size": value})


@pytest.mark.parametrize(
    "options",
    [{"top_k": True}, {"top_k": 2.0}, {"temperature": "1"}, {"temperature": True}, {"top_p": None}],
    ids=str,
)
def test_sampling_values_are_numbers(options: dict[str, Any]) -> None:
    name, value = next(iter(options.items()))
    flag = "--" + name.replace("_", "-")
    with pytest.raises(RequestError, match=f"{flag} is {value!r}; give a"):
        select_token(torch.zeros(5), "sample", **options)


@pytest.mark.parametrize("logits", [torch.zeros(0), torch.zeros(2, 5), [0.1, 0.2], None], ids=str)
def test_logits_are_one_vector(logits: Any) -> None:
    with pytest.raises(RequestError, match="give a tensor of one value for each token"):
        select_token(logits)


NO_LISTS = [torch.tensor([7, 13]), np.array([7, 13]), {7}, 7, None, "7", iter([7])]


@pytest.mark.parametrize("ids", NO_LISTS, ids=lambda ids: type(ids).__name__)
def test_a_prompt_is_a_list(ids: Any, model: KimiK3) -> None:
    with pytest.raises(RequestError, match="give a list of integer token ids"):
        next_token_logits(model, ids)


@pytest.mark.parametrize("name", [None, torch.device("cpu"), 0])
def test_a_device_is_named(name: Any) -> None:
    with pytest.raises(RequestError, match=r"--device is .*; give auto, cpu, cuda or cuda:N"):
        resolve_device(name)


def test_a_wrapped_model_is_saved_as_itself(model: KimiK3, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "wrapped.pt", nn.DataParallel(model), step=3)
    loaded, metadata = load_checkpoint_model(tmp_path / "wrapped.pt")
    assert metadata.step == 3
    assert torch.equal(next_token_logits(loaded, [7, 13]), next_token_logits(model, [7, 13]))


def test_another_module_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"the model is a Linear; give a kimik3_cli\.engine\.KimiK3"):
        save_checkpoint(tmp_path / "linear.pt", nn.Linear(2, 2))
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_file_is_not_replaced(model: KimiK3, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="exists and is no regular file"):
        save_checkpoint(tmp_path / "pipe", model)
    assert (tmp_path / "pipe").is_fifo()
