"""A Hugging Face directory gives the very model that a file of format 7 gives, whatever its spelling."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ids, mini_config, mk
from comparison import SAME, assert_close
from directories import config_json, mini_weights, released_name, save_directory, save_mini
from torch import Tensor

from kimik3_cli.engine import generate_tokens, load_checkpoint_model, next_token_logits
from kimik3_cli.engine.checkpoint import load
from kimik3_cli.engine.checkpoint.contents import read_contents
from kimik3_cli.engine.checkpoint.inspection import inspect_checkpoint
from kimik3_cli.engine.config import KimiK3Config
from kimik3_cli.engine.model.decoder import KimiK3
from kimik3_cli.errors import CheckpointError, RequestError, TooLargeError

PROMPT = ids(40)
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def logits(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    """What the same weights answer from a file of format 7."""
    path = tmp_path_factory.mktemp("plain") / "mini.pt"
    mk(path)
    return next_token_logits(load_checkpoint_model(path)[0], PROMPT)


def answered(folder: Path) -> Tensor:
    return next_token_logits(load_checkpoint_model(folder)[0], PROMPT)


def is_dense(name: str) -> bool:
    return ".layers.0." in name


def fused(tensors: Tensors) -> Tensors:
    """As the modules of transformers hold them: convolutions joined, experts stacked, a module of the forget gate."""
    made = dict(tensors)
    for layer in range(5):
        attn = f"language_model.model.layers.{layer}.self_attn."
        if f"{attn}A_log" in made:
            made[f"{attn}conv1d.weight"] = torch.cat([made.pop(f"{attn}{x}_conv1d.weight") for x in "qkv"])
            made[f"{attn}forget_gate.A_log"] = made.pop(f"{attn}A_log").view(1, 1, -1, 1)
            for name in ("dt_bias", "f_a_proj.weight", "f_b_proj.weight"):
                made[f"{attn}forget_gate.{name}"] = made.pop(f"{attn}{name}")
        moe = f"language_model.model.layers.{layer}.block_sparse_moe.experts."
        if f"{moe}0.w1.weight" in made:
            w1, w2, w3 = ([made.pop(f"{moe}{e}.w{n}.weight") for e in range(6)] for n in (1, 2, 3))
            made[f"{moe}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(w1, w3, strict=True)])
            made[f"{moe}down_proj"] = torch.stack(w2)
    return {name.replace(".block_sparse_moe.", ".mlp."): tensor for name, tensor in made.items()}


def renamed(change: Callable[[str], str]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {change(name): tensor for name, tensor in tensors.items()}


def with_vision(tensors: Tensors) -> Tensors:
    names = ("vision_tower.encoder.blocks.0.wqkv.weight", "mm_projector.proj.0.bias")
    return {**tensors, **{name: torch.ones(3) for name in names}}


def padded(tensors: Tensors) -> Tensors:
    """`A_log` as the released K3 stores it: one value for each of head_dim, the first ones real."""
    return {
        name: torch.cat([tensor, torch.full((14,), 99.0)]) if name.endswith("A_log") else tensor
        for name, tensor in tensors.items()
    }


SPELLINGS: dict[str, Callable[[Tensors], Tensors]] = {
    "released K3": dict,
    "released Kimi Linear": renamed(lambda name: name.removeprefix("language_model.")),
    "bare": renamed(lambda name: name.removeprefix("language_model.").removeprefix("model.")),
    "language_model alone": renamed(lambda name: name.replace("language_model.model.", "language_model.")),
    "compiled": renamed(lambda name: f"_orig_mod.module.{name}"),
    "feed-forward always block_sparse_moe": renamed(lambda name: name.replace(".mlp.", ".block_sparse_moe.")),
    "transformers, fused": fused,
    "vision": with_vision,
    "padded A_log": padded,
}


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("spell", SPELLINGS.values(), ids=SPELLINGS)
def test_spellings(spell: Callable[[Tensors], Tensors], shards: int, logits: Tensor, tmp_path: Path) -> None:
    save_directory(tmp_path, config_json(mini_config()), spell(mini_weights()), shards)
    assert inspect_checkpoint(tmp_path, deep=True).problems == []
    assert_close(answered(tmp_path), logits, SAME)


@pytest.mark.parametrize(
    ("spelling", "prefix"),
    [
        ("released K3", "language_model.model."),
        ("released Kimi Linear", "model."),
        ("bare", ""),
        ("compiled", "_orig_mod.module.language_model.model."),
    ],
)
def test_the_prefix_is_named(spelling: str, prefix: str, tmp_path: Path) -> None:
    save_directory(tmp_path, config_json(mini_config()), SPELLINGS[spelling](mini_weights()))
    assert inspect_checkpoint(tmp_path).stripped_prefix == prefix
    assert load_checkpoint_model(tmp_path)[1].stripped_prefix == prefix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spelling", ["released K3", "transformers, fused"])
def test_parameters_are_float32_whatever_was_stored(spelling: str, dtype: torch.dtype, tmp_path: Path) -> None:
    weights = mini_weights()
    tensors = {name: tensor.to(dtype) for name, tensor in SPELLINGS[spelling](weights).items()}
    save_directory(tmp_path, config_json(mini_config()), tensors)
    state = load_checkpoint_model(tmp_path)[0].state_dict()
    for name, tensor in weights.items():
        loaded = state[name.removeprefix("language_model.").removeprefix("model.")]
        assert loaded.dtype == torch.float32
        assert torch.equal(loaded, tensor.to(dtype).float())


def test_float32_weights_stay_in_the_mapped_file(tmp_path: Path) -> None:
    """Those of one stack are views of one mapping; changing them does not reach the file."""
    save_directory(tmp_path, config_json(mini_config()), fused(mini_weights()))
    before = (tmp_path / "model.safetensors").read_bytes()
    state = load_checkpoint_model(tmp_path)[0].state_dict()
    expert = "layers.1.block_sparse_moe.experts."
    stride = state[f"{expert}1.w1.weight"].data_ptr() - state[f"{expert}0.w1.weight"].data_ptr()
    assert stride == 2 * state[f"{expert}0.w1.weight"].nbytes
    for tensor in state.values():
        tensor.fill_(1)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_the_report_of_a_directory(tmp_path: Path) -> None:
    save_directory(tmp_path, config_json(mini_config()), with_vision(mini_weights()), 3)
    result = inspect_checkpoint(tmp_path, tensors=True, deep=True)
    assert (result.format_version, result.step, result.training_kda_backend) == (None, None, None)
    assert (result.tokenizer, result.trainer_state, result.records_verified) == (None, [], 0)
    assert result.config == KimiK3Config.from_dict(mini_config()).to_dict()
    assert result.parameters.total == 56_412
    assert result.bytes == 4 * 56_412
    assert [(use.dtype, use.tensors, use.parameters) for use in result.dtypes] == [("float32", 206, 56_412)]
    assert (result.skipped.tensors, result.skipped.bytes) == (2, 24)
    assert [shard.name for shard in result.shards] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert sum(shard.tensors for shard in result.shards) == len(result.tensors) == 208
    assert result.file_size == sum(shard.bytes for shard in result.shards)
    assert result.memory.fits
    assert "advice" not in result.memory.model_fields_set


def test_metadata(tmp_path: Path) -> None:
    save_mini(tmp_path)
    model, metadata = load_checkpoint_model(tmp_path)
    assert isinstance(model, KimiK3)
    assert (metadata.path, metadata.format_version, metadata.step) == (str(tmp_path), None, None)
    assert (metadata.training_kda_backend, metadata.inference_kda_backend) == (None, "chunkwise")
    assert (metadata.parameters, metadata.vocab_size, metadata.max_seq_len) == (56_412, 64, 512)


def changed(edit: Callable[[Tensors], object], tmp_path: Path) -> list[tuple[str, str]]:
    tensors = mini_weights()
    edit(tensors)
    save_directory(tmp_path, config_json(mini_config()), tensors)
    with pytest.raises(CheckpointError, match="does not fit its configuration"):
        load_checkpoint_model(tmp_path)
    return [(problem.kind, problem.name) for problem in inspect_checkpoint(tmp_path).problems]


def test_what_does_not_fit_is_listed(tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        del tensors[released_name("norm.weight")]
        tensors[released_name("layers.0.mlp.up_proj.weight")] = torch.ones(3, 4)
        tensors["lm_head.weight"] = tensors["language_model.lm_head.weight"].clone()
        tensors["model.layers.1.self_attn.rotary.inv_freq"] = torch.ones(3)

    assert changed(edit, tmp_path) == [
        ("duplicate", "lm_head.weight"),
        ("missing", "norm.weight"),
        ("shape", "layers.0.mlp.up_proj.weight"),
        ("unexpected", "layers.1.self_attn.rotary.inv_freq"),
    ]


@pytest.mark.parametrize(
    ("name", "shape"),
    [("conv1d.weight", shape) for shape in [(95, 1, 4), (97, 1, 4), (99, 1, 4), (96, 1, 5), (96, 4), ()]],
)
def test_fused_convolutions_that_do_not_fit(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        attn = released_name("layers.0.self_attn.")
        for letter in "qkv":
            del tensors[f"{attn}{letter}_conv1d.weight"]
        tensors[attn + name] = torch.ones(shape)

    assert {kind for kind, _ in changed(edit, tmp_path)} <= {"shape", "missing", "unexpected"}


@pytest.mark.parametrize("shape", [(5, 16, 16), (7, 16, 16), (6, 15, 16), (6, 17, 16), (6, 16), (6,), ()])
def test_stacked_experts_that_do_not_fit(shape: tuple[int, ...], tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        experts = released_name("layers.1.block_sparse_moe.experts.")
        for e in range(6):
            del tensors[f"{experts}{e}.w1.weight"], tensors[f"{experts}{e}.w3.weight"]
        tensors[f"{experts}gate_up_proj"] = torch.ones(shape)

    assert {kind for kind, _ in changed(edit, tmp_path)} <= {"shape", "missing", "unexpected"}


@pytest.mark.parametrize("kept", ["embedding", "head", "both"])
def test_tied_tables(kept: str, tmp_path: Path) -> None:
    """A file may carry either or both, as one of format 7 may; safetensors has no checksums, so both are compared."""
    tied = {"tie_word_embeddings": True}
    tensors = mini_weights(tied)
    table = tensors[released_name("embed_tokens.weight")]
    if kept != "embedding":
        tensors[released_name("lm_head.weight")] = table.clone()
    if kept == "head":
        del tensors[released_name("embed_tokens.weight")]
    save_directory(tmp_path, config_json(mini_config(tied)), tensors)
    assert inspect_checkpoint(tmp_path, deep=True).problems == []
    assert inspect_checkpoint(tmp_path).parameters.total == 54_364
    model, _ = load_checkpoint_model(tmp_path)
    assert torch.equal(model.lm_head.weight, table)


def test_tied_tables_that_differ(tmp_path: Path) -> None:
    tied = {"tie_word_embeddings": True}
    tensors = mini_weights(tied)
    tensors[released_name("lm_head.weight")] = tensors[released_name("embed_tokens.weight")] + 1
    save_directory(tmp_path, config_json(mini_config(tied)), tensors)
    assert [problem.kind for problem in inspect_checkpoint(tmp_path, deep=True).problems] == ["tie"]
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from embed_tokens.weight"):
        load_checkpoint_model(tmp_path)


def test_non_finite_values_are_found(tmp_path: Path) -> None:
    tensors = mini_weights()
    tensors[released_name("norm.weight")][3] = float("nan")
    save_directory(tmp_path, config_json(mini_config()), tensors)
    assert [(p.kind, p.name) for p in inspect_checkpoint(tmp_path, deep=True).problems] == [
        ("non_finite", "norm.weight")
    ]


def test_a_shorter_context(tmp_path: Path) -> None:
    save_mini(tmp_path)
    model, metadata = load_checkpoint_model(tmp_path, max_seq_len=70)
    assert metadata.max_seq_len == model.config.max_seq_len == 70
    with pytest.raises(RequestError, match="the model's max_seq_len is 70"):
        generate_tokens(model, PROMPT, max_new_tokens=31)
    for length in (0, 513, True):
        with pytest.raises(RequestError, match=rf"--max-seq-len is {length}; the checkpoint allows 1 to 512"):
            load_checkpoint_model(tmp_path, max_seq_len=length)


def test_end_ids(tmp_path: Path) -> None:
    """Those of generation_config.json come before config.json's, as in transformers."""
    config = config_json(mini_config({"eos_token_id": 3}))
    save_directory(tmp_path, config, mini_weights())
    assert read_contents(tmp_path).eos_token_ids == (3,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 0]}), encoding="utf-8")
    contents = read_contents(tmp_path)
    assert (contents.eos_token_ids, contents.config.eos_token_ids) == ((5, 0), (3,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_cannot_fit_is_refused_before_it_is_read(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stays in the mapped file needs no memory of its own; what is converted does."""
    tensors = {name: tensor.to(dtype) for name, tensor in mini_weights().items()}
    save_directory(tmp_path, config_json(mini_config()), tensors)
    monkeypatch.setattr(load, "machine_bytes", lambda: 4 * 56_412 - 1)
    if dtype == torch.float32:
        load_checkpoint_model(tmp_path)
        return
    monkeypatch.setattr(load, "read_as", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(
        TooLargeError, match=r"needs 226 kB of memory in fp32; cpu has 226 kB, and kimik3 inspect-checkp"
    ):
        load_checkpoint_model(tmp_path)


def test_python_takes_a_string(tmp_path: Path, logits: Tensor) -> None:
    save_mini(tmp_path)
    model: Any
    model, _ = load_checkpoint_model(str(tmp_path))
    assert_close(next_token_logits(model, PROMPT), logits, SAME)


def test_end_ids_beyond_the_vocabulary(tmp_path: Path) -> None:
    save_mini(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 64]}', encoding="utf-8")
    (problem,) = inspect_checkpoint(tmp_path).problems
    assert problem.name == "generation_config.json"
    assert "generation_config.json has eos_token_id 64; vocab_size is 64" in problem.message
    with pytest.raises(CheckpointError, match=r"generation_config.json has eos_token_id 64"):
        load_checkpoint_model(tmp_path)


def test_two_spellings_of_one_tensor_are_both_named(tmp_path: Path) -> None:
    tensors = mini_weights()
    tensors["model.norm.weight"] = tensors["language_model.model.norm.weight"].clone()
    save_directory(tmp_path, config_json(mini_config()), tensors)
    (problem,) = inspect_checkpoint(tmp_path).problems
    assert problem.kind == "duplicate"
    assert " and " in problem.message
    for name in ("model.norm.weight", "language_model.model.norm.weight"):
        assert name in problem.message.replace(" and ", " ").split()


@pytest.mark.parametrize("index", [True, False])
def test_a_folder_in_the_place_of_a_file(index: bool, tmp_path: Path) -> None:
    save_mini(tmp_path, 2)
    (lost, _) = sorted(tmp_path.glob("*.safetensors"))
    lost.unlink()
    lost.mkdir()
    if not index:
        (tmp_path / "model.safetensors.index.json").unlink()
    messages = [problem.message for problem in inspect_checkpoint(tmp_path).problems]
    assert any(f"{lost.name} is a folder, where a .safetensors file should be" in message for message in messages)
