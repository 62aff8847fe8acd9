"""How weights lie on a GPU: projections of one input side by side, so that decoding reads them in one product.

It only decides speed: every function of the model works with weights wherever they lie. On a CPU they stay in the
file, and the compiled products take several weights at once.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

# Projections of one module that read the same input.
SAME_INPUT = (
    ("q_proj", "q_a_proj", "k_proj", "v_proj", "f_a_proj", "b_proj", "kv_a_proj_with_mqa", "g_proj", "g_a_proj"),
    ("gate_proj", "up_proj"),
)


def place(
    parameters: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device | str
) -> dict[str, Tensor]:
    """Allocate, without values, the parameters that share an input with another; the others are left out.

    Args:
        parameters: name -> shape and dtype, each projection [out,in].
        device: where.
    """
    groups: dict[object, list[str]] = {}
    for name, (_, dtype) in parameters.items():
        module, _, leaf = name.removesuffix(".weight").rpartition(".")
        kind = next((number for number, leaves in enumerate(SAME_INPUT) if leaf in leaves), None)
        if kind is not None:
            groups.setdefault((module, kind, dtype), []).append(name)
    placed: dict[str, Tensor] = {}
    for names in groups.values():
        if len(names) > 1:
            rows = [parameters[name][0][0] for name in names]
            (_, inputs), dtype = parameters[names[0]]
            together = torch.empty(sum(rows), inputs, dtype=dtype, device=device)
            placed.update(zip(names, torch.split(together, rows), strict=True))
    return placed


def joined(weights: Sequence[Tensor]) -> list[Tensor]:
    """View weights [out,in] of one input as few [in,outs]: neighbours in memory as one, each other one by itself."""
    runs: list[list[Tensor]] = []
    for weight in weights:
        if runs and _are_neighbours(runs[-1][-1], weight):
            runs[-1].append(weight)
        else:
            runs.append([weight])
    return [
        run[0].as_strided((sum(len(weight) for weight in run), run[0].shape[1]), run[0].stride()).t() for run in runs
    ]


def _are_neighbours(first: Tensor, second: Tensor) -> bool:
    """Say whether the second [out,in] continues the first."""
    same = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    end = first.storage_offset() + len(first) * first.stride(0)
    return same and first.dtype == second.dtype and first.stride() == second.stride() and end == second.storage_offset()
