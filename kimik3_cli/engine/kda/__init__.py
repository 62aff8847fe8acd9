"""Kimi Delta Attention on tensors: no configuration, no modules."""
