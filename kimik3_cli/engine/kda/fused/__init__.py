"""The fused KDA path: Triton kernels, what they are launched with, and the host functions that launch them."""
