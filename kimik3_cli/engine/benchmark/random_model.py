"""Random models of named sizes, so that anyone can reproduce a table of speeds without a file."""

import json
from pathlib import Path
from typing import Literal

import torch

from kimik3_cli.engine.config import KimiK3Config
from kimik3_cli.engine.model.decoder import KimiK3
from kimik3_cli.errors import RequestError

SEED = 0


def named_config(name: str) -> KimiK3Config:
    """Return the configuration of a named size: s, m or l in two flavours, k3 and klin (the Kimi Linear subset).

    Raises:
        RequestError: (a ValueError) no such size.
    """
    table = json.loads(Path(__file__).with_name("sizes.json").read_text(encoding="utf-8"))
    if name not in table:
        raise RequestError(f"--random is {name!r}; give one of {', '.join(table)}")
    return KimiK3Config.from_dict(table[name])


def random_model(
    name: str, device: torch.device | str = "cpu", backend: Literal["chunkwise", "fused"] = "chunkwise"
) -> KimiK3:
    """Make the random float32 model of a named size, in eval mode.

    Linear weights are normal(0, in^-0.5), norms 1 +- 0.1, exp(A_log) uniform in 1..2 (softplus gates: 1..16), dt_bias
    normal(-2, 1) (softplus gates: -4): decays as a trained model has them.

    Raises:
        RequestError: (a ValueError) no such size.
    """
    config = named_config(name).with_backend(backend)
    with torch.device("meta"):
        model = KimiK3(config)
    model.to_empty(device="cpu")
    model.tie_head()
    bounded = model.config.linear_attn_config.gate_lower_bound is not None
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            _fill(parameter_name, parameter, bounded, generator)
    return model.requires_grad_(False).eval().to(device)


def _fill(name: str, parameter: torch.Tensor, bounded: bool, generator: torch.Generator) -> None:
    leaf = name.rpartition(".")[2] if not name.endswith(".weight") else name.split(".")[-2]
    if leaf == "A_log":
        parameter.uniform_(1, 2 if bounded else 16, generator=generator).log_()
    elif leaf == "dt_bias":
        parameter.normal_(-2 if bounded else -4, 1, generator=generator)
    elif leaf == "e_score_correction_bias":
        parameter.zero_()
    elif leaf.endswith("norm"):
        parameter.uniform_(0.9, 1.1, generator=generator)
    else:
        parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
