"""A loaded model holds the file's numbers in the right dtype, tied, in eval mode, and nothing of the trainer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from archives import edit_records, read_records
from checkpoints import checkpoint, fill, mini_config, mk
from hypothesis import given
from hypothesis import strategies as st
from strategies import REPEATABLE
from tensor_list import tensor_shapes

from kimik3_cli.engine import load_checkpoint_model
from kimik3_cli.engine.checkpoint import load
from kimik3_cli.engine.checkpoint.contents import read_contents
from kimik3_cli.engine.checkpoint.inspection import inspect_checkpoint
from kimik3_cli.engine.checkpoint.load import CheckpointMetadata, parameter_dtype
from kimik3_cli.engine.model.decoder import KimiK3
from kimik3_cli.errors import CheckpointError, DeviceError, RequestError

Weights = dict[str, torch.Tensor]


def loaded(path: Path) -> Weights:
    return load_checkpoint_model(path)[0].state_dict()


def converted(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, Any]], None]:
    def edit(made: dict[str, Any]) -> None:
        made["model"] = {name: change(tensor) for name, tensor in made["model"].items()}

    return edit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_parameters_are_float32_whatever_was_stored(dtype: torch.dtype, tmp_path: Path) -> None:
    mk(tmp_path / "a.pt", edit=converted(lambda tensor: tensor.to(dtype)))
    weights = loaded(tmp_path / "a.pt")
    for name, tensor in checkpoint(mini_config())["model"].items():
        assert weights[name].dtype == torch.float32
        assert torch.equal(weights[name], tensor.to(dtype).float())
    assert set(weights) == set(tensor_shapes(mini_config()))


FORMS = {
    "turned": lambda tensor: tensor.T.contiguous().T if tensor.dim() == 2 else tensor,
    "every second": lambda tensor: torch.stack([tensor, -tensor], dim=-1)[..., 0],
    "part of a larger one": lambda tensor: torch.cat([-tensor, tensor])[len(tensor) :],
    "parameters": torch.nn.Parameter,
    "parameters in bf16": lambda tensor: torch.nn.Parameter(tensor.bfloat16().float()),
}


@pytest.mark.parametrize("change", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_views_and_parameters(
    change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, tmp_path: Path
) -> None:
    edit = converted(lambda tensor: change(tensor.to(dtype)))
    made = mk(tmp_path / "a.pt", edit=edit)
    weights = loaded(tmp_path / "a.pt")
    for name, tensor in made["model"].items():
        assert torch.equal(weights[name], tensor.detach().float())
        assert weights[name].is_contiguous()


def test_weights_saved_on_a_gpu(tmp_path: Path) -> None:
    """Storages marked cuda:0 load on a machine without one."""
    path = tmp_path / "a.pt"
    made = mk(path)
    (pickled,) = (content for name, content in read_records(path).items() if name.endswith("data.pkl"))
    edit_records(path, {"data.pkl": pickled.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0")})
    assert inspect_checkpoint(path).problems == []
    weights = loaded(path)
    assert all(torch.equal(weights[name], tensor) for name, tensor in made["model"].items())


def test_metadata(tmp_path: Path) -> None:
    entry = {"name_or_path": "some/tokenizer", "revision": "main"}
    mk(tmp_path / "a.pt", {"kda_backend": "fused"}, lambda made: made.update(step=1200, tokenizer=entry, loss=0.5))
    model, metadata = load_checkpoint_model(tmp_path / "a.pt", backend="chunkwise")
    assert metadata == CheckpointMetadata(
        path=str(tmp_path / "a.pt"),
        format_version=7,
        step=1200,
        training_kda_backend="fused",
        inference_kda_backend="chunkwise",
        parameters=56412,
        vocab_size=64,
        max_seq_len=512,
        tokenizer=entry,
        stripped_prefix="",
    )
    assert model.config.kda_backend == "chunkwise"


def test_model_is_ready_for_inference(tmp_path: Path) -> None:
    mk(tmp_path / "a.pt")
    model, _ = load_checkpoint_model(tmp_path / "a.pt")
    assert isinstance(model, KimiK3)
    assert not any(module.training for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert model(torch.tensor([[1, 2, 3]])).isfinite().all()


def test_float32_weights_stay_in_the_mapped_file(tmp_path: Path) -> None:
    """Changing them changes neither the file nor another model loaded from it."""
    path = tmp_path / "a.pt"
    mk(path)
    before = path.read_bytes()
    model, _ = load_checkpoint_model(path)
    for parameter in model.parameters():
        parameter.fill_(1)
    assert path.read_bytes() == before
    assert not torch.equal(loaded(path)["norm.weight"], torch.ones(32))


def test_non_finite_weights_load(tmp_path: Path) -> None:
    mk(tmp_path / "a.pt", edit=fill("norm.weight", float("nan")))
    assert loaded(tmp_path / "a.pt")["norm.weight"].isnan().all()


def test_state_without_meaning_for_inference_is_ignored(tmp_path: Path) -> None:
    mk(tmp_path / "a.pt")
    extra = {"optimizer": {"m": torch.zeros(0, 3), "s": torch.eye(2).to_sparse()}, "lists": [{1}, (b"a",)], 5: None}
    mk(tmp_path / "b.pt", edit=lambda made: made.update(extra))
    plain, full = loaded(tmp_path / "a.pt"), loaded(tmp_path / "b.pt")
    assert all(torch.equal(plain[name], full[name]) for name in plain)


def test_torch_generator_is_not_touched(tmp_path: Path) -> None:
    mk(tmp_path / "a.pt")
    before = torch.get_rng_state()
    load_checkpoint_model(tmp_path / "a.pt")
    assert torch.equal(torch.get_rng_state(), before)


def test_whatever_stays_without_a_value_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class WithBuffer(KimiK3):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.register_buffer("table", torch.ones(3), persistent=False)

    monkeypatch.setattr(load, "KimiK3", WithBuffer)
    mk(tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="gives no value to table"):
        load_checkpoint_model(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"device": "gpu"}, RequestError),
        ({"device": "cuda:99"}, DeviceError),
        ({"backend": "eager"}, RequestError),
        ({"backend": "fused"}, DeviceError),
        ({"precision": "fp16"}, RequestError),
        ({"precision": "bf16"}, DeviceError),
    ],
)
def test_what_does_not_exist_is_refused_before_reading(options: dict[str, Any], error: type[ValueError]) -> None:
    with pytest.raises(error):
        load_checkpoint_model("no such file", **options)


BF16 = (
    "embed_tokens.weight",
    "lm_head.weight",
    "layers.0.self_attn.q_proj.weight",
    "layers.0.self_attn.f_a_proj.weight",
    "layers.0.self_attn.o_proj.weight",
    "layers.3.self_attn.kv_b_proj.weight",
    "layers.0.mlp.up_proj.weight",
    "layers.1.block_sparse_moe.experts.0.w2.weight",
    "layers.1.block_sparse_moe.shared_experts.gate_proj.weight",
    "layers.1.block_sparse_moe.routed_expert_down_proj.weight",
)
FLOAT32 = (
    "norm.weight",
    "output_attn_res_proj.weight",
    "layers.0.self_attention_res_proj.weight",
    "layers.0.mlp_res_norm.weight",
    "layers.0.self_attn.A_log",
    "layers.0.self_attn.dt_bias",
    "layers.0.self_attn.b_proj.weight",
    "layers.0.self_attn.k_conv1d.weight",
    "layers.0.self_attn.o_norm.weight",
    "layers.3.self_attn.kv_a_layernorm.weight",
    "layers.1.block_sparse_moe.gate.weight",
    "layers.1.block_sparse_moe.gate.e_score_correction_bias",
    "layers.1.block_sparse_moe.routed_expert_norm.weight",
)


@pytest.mark.parametrize("name", [*BF16, *FLOAT32])
def test_dtype_policy(name: str) -> None:
    shape = tensor_shapes(mini_config())[name]
    assert parameter_dtype(name, shape, "fp32") == torch.float32
    assert parameter_dtype(name, shape, "bf16") == (torch.bfloat16 if name in BF16 else torch.float32)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_bf16_parameters(stored: torch.dtype, tmp_path: Path) -> None:
    """What a CUDA device would be given; everything but the device is the same here."""
    made = mk(tmp_path / "a.pt", edit=converted(lambda tensor: tensor.to(stored)))
    parameters = load._parameters(read_contents(tmp_path / "a.pt"), torch.device("cpu"), "bf16")
    for name in (*BF16, *FLOAT32):
        assert parameters[name].dtype == (torch.bfloat16 if name in BF16 else torch.float32)
        assert torch.equal(parameters[name], made["model"][name].to(parameters[name].dtype))


@REPEATABLE
@given(rows=st.integers(1, 5), columns=st.integers(1, 5), data=st.data())
def test_any_view_is_read_as_torch_reads_it(
    rows: int, columns: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Strided views of a larger tensor, in every weight dtype, against torch's own reading."""
    from kimik3_cli.engine.checkpoint.archive import read_archive
    from kimik3_cli.engine.checkpoint.reading import read_as

    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
    offset = data.draw(st.integers(0, 7))
    stride = data.draw(st.tuples(st.integers(0, 12), st.integers(0, 12)))
    path = tmp_path_factory.mktemp("view") / "a.pt"
    base = torch.arange(150).to(dtype)
    torch.save({"view": base.as_strided((rows, columns), stride, offset)}, path)
    archive = read_archive(path)
    wanted = torch.load(path, weights_only=True)["view"]
    assert torch.equal(read_as(archive, archive.content["view"], torch.float32), wanted.float())
