"""What a checkpoint holds, a file of format version 7 or a directory, and how it differs from its configuration.

Everything that uses checkpoints begins here. It reads structure only and needs no torch.
"""

import gc
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from kimik3_cli.engine.checkpoint.archive import read_archive
from kimik3_cli.engine.checkpoint.files import blocks, opened, printable_path
from kimik3_cli.engine.checkpoint.huggingface.config import GENERATION_CONFIG, OWN_KEY, config_from, read_configs
from kimik3_cli.engine.checkpoint.huggingface.names import text_tensors
from kimik3_cli.engine.checkpoint.huggingface.shards import Shard, ShardStore, read_shards
from kimik3_cli.engine.checkpoint.store import Store
from kimik3_cli.engine.checkpoint.stored import (
    PACKED_DTYPE,
    LostTensor,
    PackedRef,
    StoredTensor,
    TensorRef,
    children,
    kind_of,
    printable,
    shown_key,
)
from kimik3_cli.engine.checkpoint.tensors import EMBEDDING, HEAD, TensorSpec, shape_fits, tensor_specs
from kimik3_cli.engine.config import KimiK3Config
from kimik3_cli.errors import CheckpointError, ConfigError
from kimik3_cli.results import Problem, TokenizerEntry

FORMAT_VERSION = 7
FORMAT_KEYS = ("format_version", "model_config", "model", "tokenizer")
# Accepted keys that are facts about a model and have no place in KimiK3Config.
UNUSED_KEYS = ("bos_token_id", "initializer_range", "rope_theta", "rope_scaling", "rope_parameters", "vision_config")
WRAPPERS = ("module.", "_orig_mod.")
PLAIN_DTYPES = ("float32", "bfloat16", "float16", "float64")
WEIGHT_DTYPES = (*PLAIN_DTYPES, PACKED_DTYPE)
MAX_CONFIG_VALUES, MAX_CONFIG_DEPTH, MAX_CONFIG_MESSAGE = 100_000, 8, 4000
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint holds.

    `entries` is the model dictionary as stored, `tensors` the same by the names of the model: without the `prefix` that
    the names carried, and a tied head that is stored alone as the embedding. `problems` lists all that is wrong. A
    Hugging Face directory has no format version, no trainer state, and does not say how it was trained; it may hold
    tensors that are `skipped`, and `shards` are its files.
    `unused_keys` of the configuration say something that has no meaning for the model.
    """

    store: Store
    format_version: int | None
    entries: Mapping[str, object]
    config: KimiK3Config
    specs: Mapping[str, TensorSpec]
    prefix: str
    tensors: Mapping[str, StoredTensor]
    tokenizer: TokenizerEntry | None
    trainer_state: Mapping[str, object]
    training_kda_backend: str | None
    eos_token_ids: tuple[int, ...]
    problems: list[Problem]
    shards: Sequence[Shard] = ()
    skipped: Mapping[str, StoredTensor] = field(default_factory=dict)
    unused_keys: Sequence[str] = ()

    @property
    def step(self) -> int | None:
        """The trainer's step, None when there is none that is a plain integer."""
        step = self.trainer_state.get("step")
        return step if isinstance(step, int) and not isinstance(step, bool) else None

    @property
    def undecided_tie(self) -> tuple[TensorRef, TensorRef] | None:
        """Embedding and head of a tied checkpoint that holds both, when only reading can tell if they are equal."""
        tables = _tied_tables(self.config, self.tensors)
        return tables if tables and same_values(self.store, *tables) is None else None


def read_contents(path: str | os.PathLike[str]) -> Contents:
    """Read the structure of a checkpoint and compare it with its configuration.

    Args:
        path: a file of format version 7, or a Hugging Face directory.

    Raises:
        CheckpointError: it is neither; wrong tensors are `problems` instead.
        ConfigError: the configuration is wrong, so that it is unknown which tensors there should be.
    """
    with _collector_paused():
        return _directory_contents(Path(path)) if os.path.isdir(path) else _file_contents(path)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep Python's garbage collector from walking, again and again, half a million objects that all stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _file_contents(path: str | os.PathLike[str]) -> Contents:
    archive = read_archive(path)
    name = archive.name
    top = _dictionary(archive.content, name)
    config, specs = _checked_config(top["model_config"], name)
    entries = {key if isinstance(key, str) else shown_key(key): value for key, value in top["model"].items()}
    prefix = common_prefix(entries)
    named = canonical_names(config, entries)
    tensors = {key: value for key, value in named.items() if isinstance(value, StoredTensor)}
    return Contents(
        store=archive,
        format_version=FORMAT_VERSION,
        entries=entries,
        config=config,
        specs=specs,
        prefix=prefix,
        tensors=tensors,
        tokenizer=_tokenizer(top.get("tokenizer"), name),
        trainer_state={shown_key(key): value for key, value in top.items() if key not in FORMAT_KEYS},
        training_kda_backend=config.kda_backend,
        eos_token_ids=config.eos_token_ids,
        problems=[*_tensor_problems(config, specs, named), *_tie_problems(config, archive, tensors)],
        unused_keys=_unused_keys(top["model_config"]),
    )


def _directory_contents(path: Path) -> Contents:
    raw, eos_token_ids = read_configs(path)
    store = read_shards(path)
    try:
        config = config_from(raw)
        specs = tensor_specs(config)
    except ConfigError as error:
        raise ConfigError(f"{store.name}: {printable(str(error), MAX_CONFIG_MESSAGE)}") from None
    prefix = common_prefix(store.entries)
    text = text_tensors(config, {name.removeprefix(prefix): entry for name, entry in store.entries.items()})
    named = canonical_names(config, text.tensors)
    tensors = {key: value for key, value in named.items() if isinstance(value, StoredTensor)}
    if _was_untied(raw, config, store, tensors):
        config = config.model_copy(update={"tie_word_embeddings": False})
        specs = tensor_specs(config)
    problems = [
        *_end_problems(path, eos_token_ids, config),
        *store.problems,
        *text.problems,
        *_tensor_problems(config, specs, named),
    ]
    return Contents(
        store=store,
        format_version=None,
        entries=store.entries,
        config=config,
        specs=specs,
        prefix=prefix + text.prefix,
        tensors=tensors,
        tokenizer=None,
        trainer_state={},
        training_kda_backend={**raw, **raw.get(OWN_KEY, {})}.get("kda_backend"),
        eos_token_ids=eos_token_ids or config.eos_token_ids,
        problems=[*problems, *_tie_problems(config, store, tensors)],
        shards=store.shards,
        unused_keys=_unused_keys({**raw, **(raw.get("text_config") or {})}),
        skipped={name: ref for name, ref in text.skipped.items() if isinstance(ref, StoredTensor)},
    )


def _unused_keys(raw: Mapping[str, Any]) -> list[str]:
    return [key for key in UNUSED_KEYS if raw.get(key) is not None]


def _end_problems(folder: Path, eos_token_ids: Iterable[int], config: KimiK3Config) -> Iterator[Problem]:
    """Yield the end-of-sequence ids of generation_config.json that are no tokens of the model."""
    for each in eos_token_ids:
        if each >= config.vocab_size:
            name = printable_path(folder / GENERATION_CONFIG)
            message = f"{name} has eos_token_id {each}; vocab_size is {config.vocab_size}, correct or remove it"
            yield Problem(kind="shard", name=GENERATION_CONFIG, message=message)


def _was_untied(
    raw: Mapping[str, Any], config: KimiK3Config, store: ShardStore, tensors: Mapping[str, StoredTensor]
) -> bool:
    """Say whether a head that is tied by our own object alone has since been trained apart, by another program."""
    released = {key: value for key, value in raw.items() if key != OWN_KEY}
    tables = _tied_tables(config, tensors)
    if tables is None or config_from(released).tie_word_embeddings or len({ref.dtype for ref in tables}) > 1:
        return False
    (path, start), (head_path, head_start) = [store.location(ref.storage) for ref in tables]
    with opened(path, store.files[path]) as embedding, opened(head_path, store.files[head_path]) as head:
        pairs = zip(blocks(embedding, start, tables[0].nbytes), blocks(head, head_start, tables[1].nbytes), strict=True)
        return any(first != second for first, second in pairs)


def common_prefix(names: Iterable[str]) -> str:
    """Return the prefix of `module.` and `_orig_mod.`, in any nesting, that every name carries; often empty."""
    listed = list(names)
    prefix = ""
    while listed:
        wrapper = next((w for w in WRAPPERS if all(name.startswith(prefix + w) for name in listed)), None)
        if wrapper is None:
            break
        prefix += wrapper
    return prefix


def canonical_names(config: KimiK3Config, entries: Mapping[str, T]) -> dict[str, T]:
    """Return a model dictionary by the names of the model: prefix stripped, a lone tied head as the embedding."""
    prefix = common_prefix(entries)
    named = {name.removeprefix(prefix): value for name, value in entries.items()}
    if config.tie_word_embeddings and HEAD in named and EMBEDDING not in named:
        named[EMBEDDING] = named.pop(HEAD)
    return named


def same_values(store: Store, first: TensorRef, second: TensorRef) -> bool | None:
    """Compare two tensors without reading them; None when only reading can tell.

    Views of the same numbers are equal. Two whole records of one dtype are equal when the directory's checksums are.
    """
    if first.view == second.view:
        return True
    comparable = first.is_whole_record and second.is_whole_record and first.dtype == second.dtype
    checksums = [store.record_of(ref.storage).crc for ref in (first, second)]
    return checksums[0] == checksums[1] if comparable and all(checksums) else None


def real_values(spec: TensorSpec, ref: StoredTensor) -> StoredTensor:
    """Return the view of a stored tensor that has the shape of the model: of a padded `A_log` the first H values."""
    if ref.shape == spec.shape or isinstance(ref, PackedRef):
        return ref
    along = ref.stride[ref.shape.index(max(ref.shape))]
    return TensorRef(spec.shape, ref.dtype, ref.storage, ref.offset, (along,))


def tie_problem() -> Problem:
    """Return the problem of a tied checkpoint whose two tables differ."""
    message = (
        f"{HEAD} differs from {EMBEDDING} though tie_word_embeddings is true; remove one, or set it to false "
        "(in a directory: in config.json)"
    )
    return Problem(kind="tie", name=HEAD, message=message)


def _dictionary(content: object, name: str) -> dict[str, Any]:
    """Check the top level: a dictionary of version 7 that has a configuration and a model."""
    if not isinstance(content, dict):
        raise CheckpointError(f"{name} holds a {kind_of(content)}, not a checkpoint dictionary; use save_checkpoint")
    if "format_version" not in content:
        tensors = sum(isinstance(value, TensorRef) for value in content.values())
        what = f"is a bare state dict of {tensors} tensors" if tensors else "has no format_version"
        raise CheckpointError(f"{name} {what}; kimik3 reads format version {FORMAT_VERSION}, see save_checkpoint")
    version = content["format_version"]
    if type(version) is not int or version != FORMAT_VERSION:
        shown = printable(repr(version)) if isinstance(version, int | float | str) else f"a {kind_of(version)}"
        raise CheckpointError(f"{name} has format_version {shown}; kimik3 reads {FORMAT_VERSION}, convert it first")
    for key in ("model_config", "model"):
        if key not in content:
            raise CheckpointError(
                f"{name} has no {key}; format version {FORMAT_VERSION} needs one, see save_checkpoint"
            )
        if not isinstance(content[key], dict):
            raise CheckpointError(f"{name} has a {kind_of(content[key])} as {key}; it must be a dictionary")
    return content


def _checked_config(raw: dict[Any, Any], name: str) -> tuple[KimiK3Config, dict[str, TensorSpec]]:
    left: list[tuple[object, int]] = [(raw, 0)]
    for _ in range(MAX_CONFIG_VALUES):
        if not left:
            break
        value, depth = left.pop()
        if depth > MAX_CONFIG_DEPTH:
            raise ConfigError(f"{name}: model_config is nested deeper than {MAX_CONFIG_DEPTH} levels; use plain values")
        left += [(child, depth + 1) for _, child in children(value)]
    else:
        raise ConfigError(f"{name}: model_config has more than {MAX_CONFIG_VALUES} values; use architecture keys only")
    keys = [key for key in raw if not isinstance(key, str)]
    if keys:
        raise ConfigError(f"{name}: model_config has a {kind_of(keys[0])} as key; keys are strings")
    try:
        config = KimiK3Config.from_dict(raw)
        return config, tensor_specs(config)
    except ConfigError as error:
        raise ConfigError(f"{name}: {printable(str(error), MAX_CONFIG_MESSAGE)}") from None


def _tokenizer(entry: object, name: str) -> TokenizerEntry | None:
    if entry is None:
        return None
    fields = entry if isinstance(entry, dict) else {}
    name_or_path, revision = fields.get("name_or_path"), fields.get("revision")
    if not isinstance(name_or_path, str) or not isinstance(revision, str | None):
        what = "a name_or_path that is a string and a revision that is a string or None"
        raise CheckpointError(f"{name} has a tokenizer entry that is wrong: it must be a dictionary with {what}")
    return TokenizerEntry(name_or_path=name_or_path, revision=revision)


def _tensor_problems(
    config: KimiK3Config, specs: Mapping[str, TensorSpec], named: Mapping[str, object]
) -> Iterator[Problem]:
    """Yield every missing, unexpected, misshapen and wrongly typed entry of a model dictionary."""
    wanted = dict(specs)
    if config.tie_word_embeddings and HEAD in named:
        wanted[HEAD] = specs[EMBEDDING]
    for name, spec in wanted.items():
        if name not in named:
            message = f"{name} {list(spec.shape)} is missing; the configuration asks for it"
            yield Problem(kind="missing", name=name, message=message)
        else:
            yield from _entry_problems(name, spec, named[name])
    for name, entry in named.items():
        if name not in wanted and not isinstance(entry, LostTensor):
            shown = printable(name)
            message = f"{shown} ({kind_of(entry)}) is not part of this model; remove it or correct its name"
            yield Problem(kind="unexpected", name=shown, message=message)


def _entry_problems(name: str, spec: TensorSpec, entry: object) -> Iterator[Problem]:
    if isinstance(entry, LostTensor):
        return  # the file that should hold it has a problem of its own
    if not isinstance(entry, StoredTensor):
        message = f"{name} is a {kind_of(entry)}; store it as a dense tensor"
        yield Problem(kind="dtype", name=name, message=message)
        return
    if not shape_fits(name, spec.shape, entry.shape):
        message = f"{name} has shape {list(entry.shape)}; the configuration asks for {list(spec.shape)}"
        yield Problem(kind="shape", name=name, message=message)
    if entry.dtype not in WEIGHT_DTYPES:
        message = f"{name} is stored as {entry.dtype}; store weights as {', '.join(PLAIN_DTYPES)}"
        yield Problem(kind="dtype", name=name, message=message)


def _tied_tables(config: KimiK3Config, tensors: Mapping[str, StoredTensor]) -> tuple[TensorRef, TensorRef] | None:
    """Return embedding and head of a tied checkpoint that holds both in comparable form."""
    embedding, head = tensors.get(EMBEDDING), tensors.get(HEAD)
    if not (config.tie_word_embeddings and isinstance(embedding, TensorRef) and isinstance(head, TensorRef)):
        return None
    if embedding.shape != head.shape:
        return None
    return (embedding, head) if {embedding.dtype, head.dtype} <= set(WEIGHT_DTYPES) else None


def _tie_problems(config: KimiK3Config, store: Store, tensors: Mapping[str, StoredTensor]) -> list[Problem]:
    tables = _tied_tables(config, tensors)
    return [tie_problem()] if tables and same_values(store, *tables) is False else []
