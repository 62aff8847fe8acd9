"""Every error that kimik3 raises on purpose; each kind knows its exit code and its name in JSON."""


class Kimik3Error(Exception):
    """Base of all errors raised on purpose. The message names the offending value and the remedy in one line."""

    exit_code = 1
    kind = "error"


class RequestError(Kimik3Error, ValueError):
    """The request is wrong: flags, token ids, lengths, sampling values."""

    exit_code = 2
    kind = "request"


class CheckpointError(Kimik3Error, ValueError):
    """The checkpoint is missing, unreadable or inconsistent."""

    exit_code = 3
    kind = "checkpoint"


class ConfigError(CheckpointError):
    """The checkpoint's `model_config` has an unknown key or a value that the architecture cannot honour."""

    kind = "config"


class TokenizerError(Kimik3Error, ValueError):
    """The tokenizer is missing, unreadable or does not fit the checkpoint."""

    exit_code = 3
    kind = "tokenizer"


class DeviceError(Kimik3Error, ValueError):
    """The device, precision or backend is not available on this machine."""

    exit_code = 4
    kind = "device"


class NonFiniteError(Kimik3Error, ArithmeticError):
    """The model produced NaN or infinite logits."""

    kind = "non_finite"


class TooLargeError(Kimik3Error, ValueError):
    """The model does not fit into the memory of the device."""

    kind = "memory"
