"""Checkpoints of format version 7 to Hugging Face directories and back."""
