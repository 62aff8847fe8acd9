"""The engine: loads a checkpoint, computes logits, generates tokens. Importing it costs no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kimik3_cli.engine.checkpoint.load import load_checkpoint_model
    from kimik3_cli.engine.config import KimiK3Config
    from kimik3_cli.engine.device import inference_autocast, resolve_device
    from kimik3_cli.engine.generation import generate_tokens, next_token_logits, stream_tokens
    from kimik3_cli.engine.model.decoder import KimiK3
    from kimik3_cli.engine.sampling import select_token

__all__ = [
    "KimiK3",
    "KimiK3Config",
    "generate_tokens",
    "inference_autocast",
    "load_checkpoint_model",
    "next_token_logits",
    "resolve_device",
    "select_token",
    "stream_tokens",
]

_HOME = {
    "KimiK3": "model.decoder",
    "KimiK3Config": "config",
    "generate_tokens": "generation",
    "inference_autocast": "device",
    "load_checkpoint_model": "checkpoint.load",
    "next_token_logits": "generation",
    "resolve_device": "device",
    "select_token": "sampling",
    "stream_tokens": "generation",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its home on first use, so that torch-free users stay torch-free."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
