"""Trainer checkpoints, format version 7: read, check, load, save."""
