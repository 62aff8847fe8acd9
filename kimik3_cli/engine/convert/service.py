"""`kimik3 convert`: a checkpoint of format version 7 becomes a Hugging Face directory, a directory such a file."""

import errno
import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kimik3_cli.engine.checkpoint.contents import FORMAT_VERSION, Contents, read_contents, real_values
from kimik3_cli.engine.checkpoint.files import printable_path
from kimik3_cli.engine.checkpoint.load import refuse_problems
from kimik3_cli.engine.checkpoint.save import read_back
from kimik3_cli.engine.checkpoint.tensors import EMBEDDING, HEAD, count_parameters
from kimik3_cli.engine.convert import layout, tokenizer_files
from kimik3_cli.engine.convert.destination import check_destination
from kimik3_cli.engine.convert.outgoing import Outgoing, new_dtype
from kimik3_cli.engine.convert.shards import MAX_SHARD_BYTES, write_json, write_shards
from kimik3_cli.engine.convert.torch_file import write_torch_file
from kimik3_cli.engine.replacing import replacing, sync
from kimik3_cli.requests import ConvertRequest
from kimik3_cli.results import ConvertedFile, ConvertResult, DtypeUse

Update = Callable[[str], None]


def run_convert(
    request: ConvertRequest, update: Update = lambda text: None, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> ConvertResult:
    """Convert a checkpoint: a file into a directory, a directory into a file. Written whole, or not at all.

    Numbers keep their stored dtype unless the request names one. Trainer state has no place in a directory; the result
    lists what was left behind.

    Args:
        request: what to do.
        update: is told in a few words what is going on.
        max_shard_bytes: of the tensors in one file of a directory.

    Raises:
        RequestError: the destination must not be written, or a number is too large for the dtype.
        CheckpointError: the source is unreadable, or its tensors are not those of its configuration.
        OSError: the destination cannot be written.
    """
    check_destination(request.src, request.dst, request.overwrite)
    contents = read_contents(request.src)
    refuse_problems(contents)
    form = None if request.src.is_dir() else layout.form_of(contents.config)
    tensors = _outgoing(contents, form, request.dtype)
    copied = [] if form is None else tokenizer_files.files_of_checkpoint(request.src, contents.tokenizer)
    told = _progress(tensors.values(), update)
    target = Path(os.path.realpath(request.dst))
    _refuse_full_disk(request.dst, target.parent, sum(tensor.nbytes for tensor in tensors.values()))
    with _failures_named(request.dst), replacing(target) as unfinished:
        if form is None:
            write_torch_file(unfinished, _entries(contents, request.src), tensors, contents.store, told)
        else:
            unfinished.mkdir()
            write_shards(unfinished, list(tensors.values()), contents.store, told, max_shard_bytes)
            _write_small_files(unfinished, contents, form, tensors, copied)
        update("reading it back")
        read_back(unfinished, request.dst)
        files = _described(unfinished, target.name)
    return ConvertResult(
        source=printable_path(request.src),
        destination=printable_path(request.dst),
        layout=form or "format_7",
        tensors=len(tensors),
        parameters=count_parameters(contents.config, contents.specs).total,
        bytes=sum(tensor.nbytes for tensor in tensors.values()),
        dtypes=_dtype_uses(tensors.values()),
        dropped=_dropped(contents, copied),
        files=files,
    )


def _outgoing(contents: Contents, form: layout.Form | None, asked: str | None) -> dict[str, Outgoing]:
    """Return what will be written, by the names of the model; in a directory a tied head is written out."""
    tensors = {}
    for name, spec in contents.specs.items():
        source = real_values(spec, contents.tensors[name])
        dtype = new_dtype(name, source, asked)
        stored, shape = name, spec.shape
        if form is not None:
            stored, shape = layout.stored_name(form, name), layout.stored_shape(contents.config, form, name, shape)
        tensors[name] = Outgoing(stored, shape, dtype, source)
    if form is not None and contents.config.tie_word_embeddings:
        tensors[HEAD] = tensors[EMBEDDING]._replace(name=layout.stored_name(form, HEAD))
    return tensors


def _entries(contents: Contents, src: Path) -> dict[str, Any]:
    """Return what a file of format 7 holds beside the tensors; a directory with a tokenizer becomes its entry."""
    config = contents.config.to_dict()
    if set(contents.eos_token_ids) != set(contents.config.eos_token_ids):  # generation_config.json knows better
        config["eos_token_id"] = list(contents.eos_token_ids)
    entries: dict[str, Any] = {"format_version": FORMAT_VERSION, "model_config": config}
    if tokenizer_files.tokenizer_files(src):
        entries["tokenizer"] = {"name_or_path": os.path.realpath(src), "revision": None}
    return entries


def _write_small_files(
    folder: Path, contents: Contents, form: layout.Form, tensors: Mapping[str, Outgoing], copied: list[Path]
) -> None:
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        sizes[tensor.dtype] += tensor.numel
    dtype = sizes.most_common(1)[0][0]
    write_json(folder / "config.json", layout.config_json(contents.config, form, dtype))
    write_json(folder / "generation_config.json", layout.generation_json(contents.config))
    tokenizer_files.copy(copied, folder)
    sync(folder)


def _progress(tensors: Iterable[Outgoing], update: Update) -> Callable[[Outgoing], None]:
    """Return a function that tells how much has been written when it is given the next tensor."""
    total, done = max(sum(tensor.nbytes for tensor in tensors), 1), 0

    def told(tensor: Outgoing) -> None:
        nonlocal done
        update(f"writing, {done / total:.0%}")
        done += tensor.nbytes

    return told


def _refuse_full_disk(dst: Path, folder: Path, needed: int) -> None:
    """Refuse, before anything is written, what the file system of a folder has no room for."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        what = f"DST needs {needed} bytes, and its file system has {free} free; make room, or give another place"
        raise OSError(errno.ENOSPC, what, str(dst))


@contextmanager
def _failures_named(dst: Path) -> Iterator[None]:
    """Let a failure to write name the destination, not the hidden files on the way to it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"DST could not be written ({error.strerror or error})", str(dst)) from error


def _described(written: Path, name: str) -> list[ConvertedFile]:
    """Read every file that was written and return its size and its SHA-256."""
    files = sorted(written.iterdir()) if written.is_dir() else [written]
    described = []
    for path in files:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        shown = printable_path(path.name if written.is_dir() else name)
        described.append(ConvertedFile(name=shown, bytes=path.stat().st_size, sha256=digest))
    return described


def _dtype_uses(tensors: Iterable[Outgoing]) -> list[DtypeUse]:
    """Sum up what was written by dtype, in order of first appearance."""
    uses: dict[str, list[Outgoing]] = {}
    for tensor in tensors:
        uses.setdefault(tensor.dtype, []).append(tensor)
    return [
        DtypeUse(
            dtype=dtype,
            tensors=len(group),
            parameters=sum({tensor.source.view: tensor.source.numel for tensor in group}.values()),
            bytes=sum(tensor.nbytes for tensor in group),
        )
        for dtype, group in uses.items()
    ]


def _dropped(contents: Contents, copied: list[Path]) -> list[str]:
    """Name what stays behind: trainer state, a tokenizer that is not here, what is not of its text."""
    tokenizer = ["tokenizer"] if contents.tokenizer and not copied else []
    parts = dict.fromkeys(name.partition(".")[0] for name in contents.skipped)
    return [*contents.trainer_state, *tokenizer, *parts, *contents.unused_keys]
