"""What both halves of the fused path compute on the device: gates, normalisation, decay of a state; float32.

The forms are those of `kimik3_cli.engine.kda.gates`, written so that they hold their accuracy with the approximate
exponential of a GPU.
"""

import triton
import triton.language as tl


@triton.jit
def log_decay(z, rate, lower_bound, BOUNDED: tl.constexpr):
    """Return g <= 0: lower_bound * sigmoid(rate z) when BOUNDED, else -rate softplus(z); z holds dt_bias already."""
    if BOUNDED:
        return lower_bound * tl.sigmoid(rate * z)
    else:
        return -rate * (tl.maximum(z, 0.0) + _log1p(tl.exp(-tl.abs(z))))


@triton.jit
def gate_rate(a_log):
    """Return e^{A_log}, kept finite: an infinite rate times a zero would be NaN. A NaN stays one."""
    return tl.exp(tl.minimum(a_log, 88.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def l2_normalise(x):
    """[X] -> x * rsqrt(sum x^2 + 1e-6)."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + 1e-6)


@triton.jit
def decay_state(state, g):
    """Return e^g S for log decays g that broadcast to S.

    A factor close to 1 is rounded the same way at every token or chunk and the error adds up over a long text; so slow
    channels add S * (e^g - 1) instead, and only that sum is rounded.
    """
    slow = g > -0.25
    change = tl.where(slow, _expm1(g), tl.exp(g))
    kept = tl.where(slow, 1.0, 0.0)
    return state * kept + state * change


@triton.jit
def _log1p(x):
    """log(1 + x) for x in [0,1], as 2 artanh(x / (2 + x)): accurate relative to the result however small x is."""
    s = x / (2.0 + x)  # at most 1/3
    p = s * s
    series = 1.0 / 15 + p * (1.0 / 17)
    series = 1.0 / 11 + p * (1.0 / 13 + p * series)
    series = 1.0 / 7 + p * (1.0 / 9 + p * series)
    return 2.0 * s * (1.0 + p * (1.0 / 3 + p * (1.0 / 5 + p * series)))


@triton.jit
def _expm1(x):
    """e^x - 1 for x in [-0.25,0] by its series; elsewhere meaningless."""
    series = 1.0 + x * (1.0 / 7)
    series = 1.0 + x * (1.0 / 5) * (1.0 + x * (1.0 / 6) * series)
    series = 1.0 + x * (1.0 / 3) * (1.0 + x * (1.0 / 4) * series)
    return x * (1.0 + x * (1.0 / 2) * series)
