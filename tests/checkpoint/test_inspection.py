"""The inspection's report: numbers, trainer state, deep look, and that it costs neither torch nor time."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from archives import flip
from checkpoints import LIN, fill, mini_config, mk
from cpu_time import cpu_seconds, torch_import_seconds

from kimik3_cli.engine.checkpoint.inspection import inspect_checkpoint
from kimik3_cli.engine.config import KimiK3Config

Edit = Callable[[dict[str, Any]], object]


def test_report_of_the_mini_model(tmp_path: Path) -> None:
    path = tmp_path / "mini.pt"
    mk(path, edit=lambda made: made.update(step=1200))
    result = inspect_checkpoint(path)
    assert result.path == str(path)
    assert result.file_size == path.stat().st_size
    assert (result.format_version, result.step, result.stripped_prefix) == (7, 1200, "")
    assert (result.training_kda_backend, result.tokenizer, result.tied_embeddings) == ("chunkwise", None, False)
    assert result.config == KimiK3Config.from_dict(mini_config()).to_dict()
    assert result.bytes == result.memory.weights_bytes == 4 * 56412
    (use,) = result.dtypes
    assert (use.dtype, use.tensors, use.parameters, use.bytes) == ("float32", 206, 56412, 4 * 56412)
    # 4 KDA layers: state 2 x 16 x 16 and three tails of 3 inputs of 32 channels; 1 MLA layer: 12 + 4 a token.
    assert result.memory.cache_bytes_fixed == 4 * 4 * (2 * 16 * 16 + 3 * 3 * 32)
    assert result.memory.cache_bytes_per_token == 4 * (12 + 4)
    assert result.problems == []


def test_json_is_the_contract(tmp_path: Path) -> None:
    mk(tmp_path / "a.pt")
    plain = json.loads(inspect_checkpoint(tmp_path / "a.pt").to_json())
    assert plain["model_config"]["linear_attn_config"]["kda_layers"] == LIN["kda_layers"]
    assert plain["step"] is None
    assert not {"tensors", "records_verified"} & set(plain)
    full = json.loads(inspect_checkpoint(tmp_path / "a.pt", tensors=True, deep=True).to_json())
    assert full["tensors"][0] == {
        "name": "embed_tokens.weight",
        "shape": [64, 32],
        "dtype": "float32",
        "bytes": 8192,
    }
    assert len(full["tensors"]) == 206


def test_several_dtypes(tmp_path: Path) -> None:
    def edit(made: dict[str, Any]) -> None:
        for name, tensor in made["model"].items():
            if name.startswith("layers."):
                made["model"][name] = tensor.bfloat16()
        made["model"]["norm.weight"] = made["model"]["norm.weight"].double()

    mk(tmp_path / "a.pt", edit=edit)
    result = inspect_checkpoint(tmp_path / "a.pt")
    found = {use.dtype: (use.tensors, use.parameters, use.bytes) for use in result.dtypes}
    outside = 2 * 2048 + 2 * 32
    assert found["float32"] == (4, outside, 4 * outside)
    assert found["float64"] == (1, 32, 8 * 32)
    assert found["bfloat16"] == (201, 56412 - outside - 32, 2 * (56412 - outside - 32))
    assert result.bytes == sum(use.bytes for use in result.dtypes)
    assert result.memory.weights_bytes == 4 * 56412


def trainer_state(path: Path, **state: Any) -> list[tuple[str, str, int]]:
    mk(path, edit=lambda made: made.update(state))
    result = inspect_checkpoint(path)
    json.loads(result.to_json())
    return [(entry.name, entry.kind, entry.bytes) for entry in result.trainer_state]


def test_trainer_state(tmp_path: Path) -> None:
    moments = torch.zeros(500)
    entries = trainer_state(
        tmp_path / "a.pt",
        step=3,
        optimizer={"m": moments, "v": moments.clone(), "groups": [{"lr": 0.1, "betas": (0.9, 0.95)}]},
        rng=torch.get_rng_state(),
        cursor=bytearray(b"12345"),
        nothing=None,
        empty={},
        dtype=torch.bfloat16,
        sparse=torch.eye(4).to_sparse(),
    )
    assert entries == [
        ("step", "int", 0),
        ("optimizer.m", "float32 [500]", 2000),
        ("optimizer.v", "float32 [500]", 2000),
        ("optimizer.groups.0.lr", "float", 0),
        ("optimizer.groups.0.betas.0", "float", 0),
        ("optimizer.groups.0.betas.1", "float", 0),
        ("rng", "uint8 [5056]", 5056),
        ("cursor", "bytes", 5),
        ("nothing", "NoneType", 0),
        ("empty", "dict of 0", 0),
        ("dtype", "torch.bfloat16", 0),
        ("sparse", "sparse tensor", 2 * 4 * 8 + 4 * 4),
    ]


def test_plain_values_of_the_trainer_state(tmp_path: Path) -> None:
    values = {"loss": 1.5, "best": math.inf, "last": math.nan, "done": False, "big": 2**70, "run": "a\x1b[31m\ud800"}
    mk(tmp_path / "a.pt", edit=lambda made: made.update({**values, "long": "x" * 5000}))
    entries = {entry.name: entry.value for entry in inspect_checkpoint(tmp_path / "a.pt").trainer_state}
    assert entries.pop("long") == "x" * 200 + "..."
    assert entries == {**values, "best": "inf", "last": "nan", "run": "a\\x1b[31m\\ud800"}
    assert type(entries["done"]) is bool


def test_large_containers_are_summed_up(tmp_path: Path) -> None:
    state = {n: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(10)} for n in range(1000)}
    groups = [{"lr": 0.1, "params": list(range(1000))}]
    entries = trainer_state(tmp_path / "a.pt", optimizer={"state": state, "param_groups": groups})
    assert entries == [
        ("optimizer.state", "dict of 1000", 1000 * 44),
        ("optimizer.param_groups.0.lr", "float", 0),
        ("optimizer.param_groups.0.params", "list of 1000", 0),
    ]


def test_deep_shared_and_endless_containers(tmp_path: Path) -> None:
    endless: list[Any] = [torch.zeros(2)]
    endless.append(endless)
    shared: list[Any] = [torch.zeros(3)]
    for _ in range(100):
        shared = [shared, shared]
    entries = trainer_state(tmp_path / "a.pt", endless=endless, shared=shared)
    assert entries[:2] == [("endless.0", "float32 [2]", 8), ("endless.1", "list of 2", 0)]
    assert sum(size for name, _, size in entries if name.startswith("shared")) == 12
    assert len(entries) < 20


def test_odd_keys_of_the_trainer_state(tmp_path: Path) -> None:
    entries = trainer_state(tmp_path / "a.pt", state={("a", 1): 1, None: 2, "b\n": 3, torch.device("cpu"): 4})
    assert [name for name, _, _ in entries] == ["state.a, 1", "state.None", "state.b\\n", "state.torch.device"]


def test_deep_look_at_a_sound_file(tmp_path: Path) -> None:
    mk(tmp_path / "a.pt", edit=lambda made: made.update(optimizer=torch.full((10,), float("nan"))))
    result = inspect_checkpoint(tmp_path / "a.pt", deep=True)
    assert result.problems == []
    # 206 tensors, the optimizer, the pickle, and five small records of torch's own.
    assert result.records_verified == 213


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_non_finite_values_are_counted(dtype: torch.dtype, tmp_path: Path) -> None:
    def edit(made: dict[str, Any]) -> None:
        weight = made["model"]["layers.3.self_attn.o_proj.weight"].to(dtype)
        weight[0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
        made["model"]["layers.3.self_attn.o_proj.weight"] = weight
        made["model"]["norm.weight"] = torch.full((64,), float("nan"))[::2]

    mk(tmp_path / "a.pt", edit=edit)
    assert inspect_checkpoint(tmp_path / "a.pt").problems == []
    found = {p.name: (p.kind, p.message) for p in inspect_checkpoint(tmp_path / "a.pt", deep=True).problems}
    assert set(found) == {"norm.weight", "layers.3.self_attn.o_proj.weight"}
    assert {kind for kind, _ in found.values()} == {"non_finite"}
    assert "has 32 NaN or infinite values of 32" in found["norm.weight"][1]
    assert "has 3 NaN or infinite values of 512" in found["layers.3.self_attn.o_proj.weight"][1]


def test_tensors_larger_than_a_block_are_read_whole(tmp_path: Path) -> None:
    def edit(made: dict[str, Any]) -> None:
        for name in ("embed_tokens.weight", "lm_head.weight"):
            made["model"][name] = torch.zeros(20_000, 32)
        made["model"]["lm_head.weight"][-1, -1] = float("nan")
        made["model"]["embed_tokens.weight"][8191, 31] = float("nan")

    mk(tmp_path / "a.pt", {"vocab_size": 20_000}, edit)
    problems = inspect_checkpoint(tmp_path / "a.pt", deep=True).problems
    assert [(p.name, " 1 NaN" in p.message) for p in problems] == [
        ("embed_tokens.weight", True),
        ("lm_head.weight", True),
    ]


def test_damaged_records_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"

    def edit(made: dict[str, Any]) -> None:
        fill("layers.0.self_attn.dt_bias", 1234.5)(made)
        made["optimizer"] = torch.full((100,), 4321.5)

    mk(path, edit=edit)
    content = path.read_bytes()
    for value in (1234.5, 4321.5):
        flip(path, content.index(torch.full((20,), value).numpy().tobytes()), 7)
    assert inspect_checkpoint(path).problems == []
    bias, optimizer = inspect_checkpoint(path, deep=True).problems
    assert (bias.kind, optimizer.kind) == ("checksum", "checksum")
    assert "(layers.0.self_attn.dt_bias) differs from its checksum" in bias.message
    assert "differs from its checksum; the file is damaged, copy it again" in optimizer.message


def test_record_shared_by_many_tensors(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    shared = torch.full((48 * 32,), 99.25)

    def edit(made: dict[str, Any]) -> None:
        for name in ("gate_proj", "up_proj", "down_proj"):
            shape = made["model"][f"layers.0.mlp.{name}.weight"].shape
            made["model"][f"layers.0.mlp.{name}.weight"] = shared.view(shape)
        made["model"]["norm.weight"] = shared[:32]

    mk(path, edit=edit)
    flip(path, path.read_bytes().index(shared.numpy().tobytes()) + 400, 7)
    (problem,) = inspect_checkpoint(path, deep=True).problems
    assert "(layers.0.mlp.gate_proj.weight, layers.0.mlp.up_proj.weight, layers.0.mlp.down_proj.weight and 1 more)" in (
        problem.message
    )


def test_damaged_record_header_is_a_checksum_problem(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    mk(path, edit=fill("layers.0.self_attn.dt_bias", 1234.5))
    content = path.read_bytes()
    flip(path, content.rindex(b"PK\x03\x04", 0, content.index(torch.full((20,), 1234.5).numpy().tobytes())), 0)
    assert inspect_checkpoint(path).problems == []
    (problem,) = inspect_checkpoint(path, deep=True).problems
    assert problem.kind == "checksum"
    assert "(layers.0.self_attn.dt_bias) differs" in problem.message


SPY = """
import json, sys
from kimik3_cli.engine.checkpoint.inspection import inspect_checkpoint
result = inspect_checkpoint(sys.argv[1], tensors=True)
print(json.dumps([len(result.tensors), len(result.problems), sorted(sys.modules)]))
"""


def test_two_thousand_tensors_without_torch_in_less_than_half_its_import(tmp_path: Path) -> None:
    path = tmp_path / "many.pt"
    mk(path, {"num_experts": 160})
    inspection = [sys.executable, "-c", SPY, path]
    tensors, problems, modules = json.loads(subprocess.run(inspection, capture_output=True, check=True).stdout)
    assert tensors > 2000
    assert problems == 0
    assert not {"torch", "numpy", "transformers", "safetensors", "typer", "rich"} & set(modules)
    assert min(cpu_seconds(inspection) for _ in range(4)) < 0.4 * torch_import_seconds()
