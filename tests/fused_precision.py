"""What each input precision of the fused prefill costs, measured in Triton's interpreter; prints a table.

    TRITON_INTERPRET=1 python tests/fused_precision.py

The interpreter's products keep of their operands what a tensor core keeps (`triton_interpreter.product`). Errors are
max|difference| / max|float64| of the outputs and of the final state, the larger of the two. The last column is the
recurrence, token by token in float32, with its state rounded to bfloat16 after every token.
"""

from typing import get_args

import torch
import triton_interpreter  # noqa: F401  (prepares the interpreter)
from kda.fused.raw_inputs import Raw, in_float64, make, relative_errors
from torch import Tensor

from kimik3_cli.engine.kda.fused.launch import Precision
from kimik3_cli.engine.kda.fused.prefill import kda_fused
from kimik3_cli.engine.kda.gates import decay_rate, l2_normalise, log_decay
from kimik3_cli.engine.kda.recurrent import kda_step

LENGTH, SIZE = 256, 128
CASES = (
    ("bounded, anywhere", "random"),
    ("bounded, all -5", "random"),
    ("mixed anywhere", "random"),
    ("softplus, near zero", "random"),
    ("softplus, near zero", "nearly equal"),
    ("softplus, near zero", "all equal"),
)


def with_bf16_state(raw: Raw) -> tuple[Tensor, Tensor]:
    """`kda_recurrent` of the same inputs, its state rounded after every token."""
    rate = decay_rate(raw.a_log, raw.lower_bound)
    g = log_decay(raw.z + raw.dt_bias.view(raw.z.shape[2:]), rate, raw.lower_bound)
    q, k, beta = l2_normalise(raw.q) * SIZE**-0.5, l2_normalise(raw.k), torch.sigmoid(raw.beta_logits)
    outputs, state = [], raw.initial_state
    for t in range(LENGTH):
        output, state = kda_step(q[:, t], k[:, t], raw.v[:, t], g[:, t], beta[:, t], state)
        state = state.bfloat16().float()
        outputs.append(output)
    return torch.stack(outputs, dim=1), state


def main() -> None:
    print(f"| gates | keys | {' | '.join(get_args(Precision))} | state in bf16 |")
    print("| --- | --- | --- | --- | --- | --- |")
    for gates, keys in CASES:
        raw = make(LENGTH, gates, keys, sizes=(SIZE, SIZE))
        expected = in_float64(raw)
        errors = [
            max(relative_errors(kda_fused(*raw, input_precision=precision), expected))
            for precision in get_args(Precision)
        ]
        errors.append(max(relative_errors(with_bf16_state(raw), expected)))
        print(f"| {gates} | {keys} | {' | '.join(f'{error:.1e}' for error in errors)} |", flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()
