"""Hugging Face directories: config.json and safetensors files, as the released models and transformers spell them."""
