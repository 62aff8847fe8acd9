"""Which KDA paths can run where."""

import torch


def why_not_fused(device: torch.device) -> str | None:
    """Return the first condition that the fused path lacks on this device; None when it can run."""
    if device.type != "cuda":
        return f"the fused path needs a CUDA device and the device is {str(device)!r}"
    return "this version of kimik3 has no fused kernels"
