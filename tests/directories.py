"""Hugging Face directories, made tensor by tensor: small whole ones, and the released K3 as a stand-in of holes."""

import json
import struct
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from checkpoints import mini_config, random_weights
from safetensors.torch import save_file
from tensor_list import tensor_shapes
from torch import Tensor

INDEX = "model.safetensors.index.json"
RELEASED = Path(__file__).parent / "convert" / "released_k3_config.json"
# What the released K3 has, by its model card and its index.
RELEASED_SHARDS, RELEASED_TENSORS, RELEASED_VISION_TENSORS = 96, 497_220, 168
ITEM_BYTES = {"BF16": 2, "F32": 4, "U8": 1}
# Keys of a trainer's configuration that a config.json does not have.
OWN_KEYS = ("max_seq_len", "kda_chunk_size", "kda_backend")

Entry = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


def config_json(model_config: Mapping[str, Any]) -> dict[str, Any]:
    """The nested config.json of a trainer's configuration, by the released names."""
    text = {key: value for key, value in model_config.items() if key not in OWN_KEYS}
    text |= {"model_type": "kimi_linear", "max_position_embeddings": model_config["max_seq_len"]}
    text = {"hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, **text}
    text = {"mla_use_output_gate": True, "latent_moe_use_norm": True, "rms_norm_eps": 1e-5, **text}
    return {"model_type": "kimi_k3", "text_config": text, "vision_config": {"patch_size": 14}}


def released_name(name: str) -> str:
    """The name of one of the model's tensors in the files of the released K3."""
    return f"language_model.{name}" if name.startswith("lm_head.") else f"language_model.model.{name}"


def save_directory(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], shards: int = 1) -> None:
    """Write config.json and safetensors files, the tensors spread over the shards in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return
    names = [f"model-{number:05}-of-{shards:05}.safetensors" for number in range(1, shards + 1)]
    weight_map = {tensor: names[number % shards] for number, tensor in enumerate(tensors)}
    for file in names:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")


def mini_weights(cfg: dict[str, Any] | None = None, lin: dict[str, Any] | None = None) -> dict[str, Tensor]:
    """The random weights of the mini model, or of a changed one, by the names of the released K3."""
    return {released_name(name): tensor for name, tensor in random_weights(mini_config(cfg, lin)).items()}


def save_mini(folder: Path, shards: int = 1) -> dict[str, Tensor]:
    """Write the mini model as a nested directory; returns its tensors by the names in the files."""
    tensors = mini_weights()
    save_directory(folder, config_json(mini_config()), tensors, shards)
    return tensors


def save_released_stand_in(folder: Path) -> None:
    """Write the released K3 as 96 files with real headers and holes for numbers: 1.56 TB that take no space."""
    folder.mkdir()
    config = json.loads(RELEASED.read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    entries = list(released_entries(config["text_config"]))
    assert len(entries) == RELEASED_TENSORS
    share = -(-len(entries) // RELEASED_SHARDS)
    weight_map = {}
    for number in range(RELEASED_SHARDS):
        file = f"model-{number + 1:05}-of-{RELEASED_SHARDS:06}.safetensors"
        held = entries[number * share : (number + 1) * share]
        write_holes(folder / file, held)
        weight_map |= {name: file for name, _, _ in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")


def released_entries(text_config: Mapping[str, Any]) -> Iterator[Entry]:
    """Every tensor of the released K3: experts packed, `A_log` padded to the head size, a vision tower."""
    for name, shape in tensor_shapes({**text_config, "max_seq_len": 1}).items():
        stored = released_name(name)
        if ".experts." in name:
            rows, columns = shape
            yield f"{stored}_packed", "U8", (rows, columns // 2)
            yield f"{stored}_scale", "U8", (rows, columns // 32)
        elif name.endswith(".A_log"):
            yield stored, "F32", (text_config["linear_attn_config"]["head_dim"],)
        else:
            yield stored, "F32" if name.endswith(("dt_bias", "e_score_correction_bias")) else "BF16", shape
    for number in range(RELEASED_VISION_TENSORS):
        part = "mm_projector.proj" if number < 3 else "vision_tower.encoder.blocks"
        yield f"{part}.{number}.weight", "BF16", (1024, 1024)


def write_holes(path: Path, entries: list[Entry]) -> None:
    """Write a safetensors file with a real header and nothing but holes behind it."""
    header, end = {}, 0
    for name, dtype, shape in entries:
        start, end = end, end + prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
