"""What each input precision of the matrix products costs, with operands rounded as tensor cores round them."""

from typing import get_args

from raw_inputs import BOUND, in_float64, make, relative_errors

from kimik3_cli.engine.kda.fused.launch import INPUT_PRECISION, Precision
from kimik3_cli.engine.kda.fused.prefill import kda_fused

CASES = (("bounded, anywhere", "random"), ("softplus, near zero", "random"), ("softplus, near zero", "all equal"))


def largest_errors(length: int = 48, sizes: tuple[int, int] = (64, 32)) -> dict[str, float]:
    """Input precision -> largest relative error of outputs and states over all cases."""
    inputs = [make(length, gates, keys, sizes=sizes) for gates, keys in CASES]
    expected = [in_float64(raw) for raw in inputs]
    return {
        precision: max(
            error
            for raw, right in zip(inputs, expected, strict=True)
            for error in relative_errors(kda_fused(*raw, input_precision=precision), right)
        )
        for precision in get_args(Precision)
    }


def test_the_default_is_as_exact_as_float32_and_tf32_is_not() -> None:
    errors = largest_errors()
    print(errors)
    assert INPUT_PRECISION == "tf32x3"
    assert errors["ieee"] <= errors["tf32x3"] <= BOUND / 4
    assert 20 * errors["tf32x3"] < errors["tf32"] < 1e-2
