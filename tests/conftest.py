"""Runs before any test module is imported."""

import os

# Triton reads it when it is first imported: kernels then run in its interpreter, on CPU tensors.
os.environ.setdefault("TRITON_INTERPRET", "1")
