"""kimik3: run Kimi-K3-architecture checkpoints from a shell or from Python."""

__version__ = "0.1.0"
