"""MXFP4 experts: decoded exactly, in pieces, and put where the model wants them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ids, mini_config, mk
from directories import config_json, mini_weights, save_directory
from safetensors.torch import load_file, save_file
from torch import Tensor

from kimik3_cli.engine import load_checkpoint_model, next_token_logits
from kimik3_cli.engine.checkpoint.contents import read_contents
from kimik3_cli.engine.checkpoint.huggingface.shards import read_shards
from kimik3_cli.engine.checkpoint.inspection import inspect_checkpoint
from kimik3_cli.engine.checkpoint.reading import pieces, read_as
from kimik3_cli.engine.checkpoint.stored import PackedRef
from kimik3_cli.errors import CheckpointError

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Latent 64 and width 32, so that the rows of all three matrices are whole groups.
SIZES = {"routed_expert_hidden_size": 64, "moe_intermediate_size": 32}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True},
        }
    },
}


def decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """One number at a time in double precision, straight from the definition."""
    rows, columns = codes.shape[0], codes.shape[1] * 2
    numbers = torch.empty(rows, columns, dtype=torch.float64)
    for row in range(rows):
        for column in range(columns):
            byte = int(codes[row, column // 2])
            code = byte >> 4 if column % 2 else byte & 15
            exponent = int(scales[row, column // 32])
            numbers[row, column] = E2M1[code] * 2.0 ** (exponent - 127) if exponent != 255 else float("nan")
    return numbers


def save_packed(folder: Path, lowest: int = 118, highest: int = 124) -> dict[str, Tensor]:
    """Write a mini model with packed experts of random codes; its tensors by the model's names, experts decoded."""
    draw = torch.Generator().manual_seed(0)
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in mini_weights(SIZES).items():
        ours = name.removeprefix("language_model.").removeprefix("model.")
        if ".experts." not in name:
            stored[name] = plain[ours] = tensor
            continue
        rows, columns = tensor.shape
        codes = torch.randint(0, 256, (rows, columns // 2), generator=draw, dtype=torch.uint8)
        scales = torch.randint(lowest, highest, (rows, columns // 32), generator=draw, dtype=torch.uint8)
        stored |= {f"{name}_packed": codes, f"{name}_scale": scales}
        plain[ours] = decoded(codes, scales).float()
    config = config_json(mini_config(SIZES))
    config["text_config"]["quantization_config"] = QUANTIZATION
    save_directory(folder, config, stored)
    return plain


def test_every_code_under_every_scale(tmp_path: Path) -> None:
    """All 16 codes, low half first, under all 256 scales: exact, infinite beyond float32, and 255 is not a number."""
    codes = (torch.arange(16) % 8 * 2).repeat(256, 1)  # 0x?0, then the high half
    codes = (codes + 16 * (codes + 1)).to(torch.uint8)
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1)
    save_directory(tmp_path, {}, {"w_packed": codes, "w_scale": scales})
    store = read_shards(tmp_path)
    ref = PackedRef(store.entries["w_packed"], store.entries["w_scale"])
    wanted = decoded(codes, scales)
    assert ref.shape == (256, 32)
    assert torch.equal(read_as(store, ref, torch.float32)[:255], wanted[:255].float())
    assert read_as(store, ref, torch.float32)[255].isnan().sum() == 32
    assert torch.equal(read_as(store, ref, torch.bfloat16)[:250], wanted[:250].bfloat16())
    assert torch.equal(wanted[:250].bfloat16().double(), wanted[:250]), "bfloat16 is exact"


def test_pieces_are_bounded_and_join(tmp_path: Path) -> None:
    """A matrix of 3 MiB of codes is never decoded at once."""
    draw = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (1000, 3200), generator=draw, dtype=torch.uint8)
    scales = torch.randint(100, 140, (1000, 200), generator=draw, dtype=torch.uint8)
    save_directory(tmp_path, {}, {"w_packed": codes, "w_scale": scales})
    store = read_shards(tmp_path)
    parts = list(pieces(store, PackedRef(store.entries["w_packed"], store.entries["w_scale"])))
    assert max(map(len, parts)) <= 2 * 2**20
    table = torch.tensor(E2M1, dtype=torch.float64)
    nibbles = torch.stack([codes % 16, codes // 16], dim=-1).view(1000, 6400).long()
    wanted = table[nibbles] * 2.0 ** (scales.double().repeat_interleave(32, dim=1) - 127)
    assert torch.equal(torch.cat(parts).view(1000, 6400).double(), wanted)


def test_a_packed_model_is_the_decoded_one(tmp_path: Path) -> None:
    plain = save_packed(tmp_path / "packed")
    mk(tmp_path / "plain.pt", SIZES, lambda made: made["model"].update(plain))
    packed, metadata = load_checkpoint_model(tmp_path / "packed")
    model, _ = load_checkpoint_model(tmp_path / "plain.pt")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in packed.state_dict().items())
    assert torch.equal(next_token_logits(packed, ids(20)), next_token_logits(model, ids(20)))
    assert metadata.parameters == sum(tensor.numel() for tensor in plain.values())


def test_inspection_counts_the_numbers_and_the_bytes(tmp_path: Path) -> None:
    save_packed(tmp_path)
    result = inspect_checkpoint(tmp_path, deep=True)
    use = next(use for use in result.dtypes if use.dtype == "mxfp4")
    numbers = 4 * 6 * 3 * 64 * 32
    assert (use.tensors, use.parameters, use.bytes) == (4 * 6 * 3, numbers, numbers // 2 + numbers // 32)
    assert result.parameters.parts.routed_experts == numbers
    assert result.problems == []


def test_a_scale_that_is_no_number_is_found(tmp_path: Path) -> None:
    save_packed(tmp_path, 255, 256)
    found = inspect_checkpoint(tmp_path, deep=True).problems
    assert {problem.kind for problem in found} == {"non_finite"}
    assert len(found) == 4 * 6 * 3


NAME = "layers.1.block_sparse_moe.experts.0.w1.weight"
FULL = "language_model.model." + NAME


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({f"{FULL}_scale": None}, {"missing", "unexpected"}),
        ({f"{FULL}_packed": None}, {"missing", "unexpected"}),
        ({f"{FULL}_scale": torch.zeros(32, 1, dtype=torch.uint8)}, {"shape"}),
        ({f"{FULL}_scale": torch.zeros(32, 2)}, {"shape"}),
        ({f"{FULL}_packed": torch.zeros(32, 32, dtype=torch.int32)}, {"shape"}),
        ({FULL: torch.zeros(32, 64)}, {"duplicate"}),
    ],
)
def test_pairs_that_do_not_fit(changes: dict[str, Any], kinds: set[str], tmp_path: Path) -> None:
    save_packed(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, tmp_path / "model.safetensors")
    assert {problem.kind for problem in inspect_checkpoint(tmp_path).problems} == kinds
    with pytest.raises(CheckpointError, match="does not fit its configuration"):
        load_checkpoint_model(tmp_path)


def test_one_packed_expert_is_read_alone(tmp_path: Path) -> None:
    plain = save_packed(tmp_path)
    contents = read_contents(tmp_path)
    assert torch.equal(read_as(contents.store, contents.tensors[NAME], torch.float32), plain[NAME])
