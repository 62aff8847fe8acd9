"""A checkpoint of format version 7: the keys of its dictionary, and how its tensors differ from the configuration."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from kimik3_cli.engine.checkpoint.archive import Archive, named, read_archive
from kimik3_cli.engine.checkpoint.stored import TensorRef, kind_of, printable
from kimik3_cli.engine.checkpoint.tensors import EMBEDDING, HEAD, TensorSpec, shape_fits, tensor_specs
from kimik3_cli.engine.config import KimiK3Config
from kimik3_cli.errors import CheckpointError, ConfigError
from kimik3_cli.results import Problem

FORMAT_VERSION = 7
RESERVED_KEYS = ("format_version", "model_config", "model", "tokenizer")
WRAPPERS = ("module.", "_orig_mod.")
WEIGHT_DTYPES = ("float32", "bfloat16", "float16", "float64")
CONFIG_DEPTH, CONFIG_VALUES = 8, 100_000
T = TypeVar("T")
