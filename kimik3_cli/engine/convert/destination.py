"""Where the new checkpoint goes: what is refused before anything is read, so that nobody's work is removed."""

import re
from pathlib import Path

from kimik3_cli.engine.checkpoint.archive import read_archive
from kimik3_cli.engine.checkpoint.files import printable_path
from kimik3_cli.engine.checkpoint.huggingface.config import CONFIG, FLAT, GENERATION_CONFIG, NESTED, read_configs
from kimik3_cli.engine.checkpoint.huggingface.shards import INDEX, SUFFIX
from kimik3_cli.engine.convert import tokenizer_files
from kimik3_cli.errors import CheckpointError, RequestError

FILE_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", SUFFIX)
# What a directory of a model consists of, beside its tokenizer.
MODEL_FILES = re.compile(rf"({re.escape(CONFIG)}|{GENERATION_CONFIG}|{INDEX}|model(-\d+-of-\d+)?{re.escape(SUFFIX)})")
SHOWN_FILES = 3


def check_destination(src: Path, dst: Path, overwrite: bool) -> None:
    """Check that the new file or directory may be written: a directory when `src` is a file, else a file.

    Raises:
        RequestError: there is something that must not be replaced, or no folder to write in.
    """
    name = printable_path(dst)
    if not dst.parent.is_dir():
        raise RequestError(f"DST is {name}; the folder {printable_path(dst.parent)} does not exist")
    if dst.is_symlink() and not dst.exists():
        raise RequestError(f"DST is {name}, a link to nothing; remove it, or give another name")
    if src.is_dir():
        _check_file(name, src, dst)
    elif src.exists():
        _check_directory(name, src, dst)
    if dst.exists() and not overwrite:
        raise RequestError(f"DST is {name}, which exists; give another name, or --overwrite to replace it")


def _check_file(name: str, src: Path, dst: Path) -> None:
    what = f"SRC is the directory {printable_path(src)}, so DST is a file"
    if dst.is_dir():
        raise RequestError(f"{what}; {name} is a directory: name a file")
    if dst.suffix == SUFFIX:
        raise RequestError(f"{what} of torch.save; {name} is the name of a safetensors file: give one such as NAME.pt")
    if dst.exists() and not dst.is_file():
        raise RequestError(f"DST is {name}, which is no regular file; give another name")
    if src.resolve() in dst.resolve().parents:
        raise RequestError(f"DST is {name}, inside SRC; give a name in another folder")
    if dst.exists() and not _is_checkpoint(dst):
        raise RequestError(f"DST is {name}, which exists and is no checkpoint to replace; give another name")


def _check_directory(name: str, src: Path, dst: Path) -> None:
    what = f"SRC is the file {printable_path(src)}, so DST is a directory"
    if dst.suffix in FILE_SUFFIXES:
        raise RequestError(f"{what}; {name} is the name of a file: give one without {dst.suffix}")
    if dst.exists() and not dst.is_dir():
        raise RequestError(f"{what}; {name} is a file: name a directory")
    if dst.resolve() in src.resolve().parents:
        raise RequestError(f"DST is {name}, the folder that SRC lies in; give another name")
    if dst.is_dir():
        _check_replaceable(name, dst)


def _is_checkpoint(path: Path) -> bool:
    """Say whether a file is empty or a checkpoint of a format version."""
    try:
        content = read_archive(path).content if path.stat().st_size else {"format_version": None}
    except CheckpointError:
        return False
    return isinstance(content, dict) and "format_version" in content


def _check_replaceable(name: str, folder: Path) -> None:
    """Refuse to replace a folder that is neither empty nor the directory of such a model, and of nothing else."""
    entries = sorted(folder.iterdir())
    strange = [entry for entry in entries if not (entry.is_file() and _is_of_a_model(entry.name))]
    if strange:
        shown = ", ".join(printable_path(entry.name) for entry in strange[:SHOWN_FILES])
        more = f" and {len(strange) - SHOWN_FILES} more" if len(strange) > SHOWN_FILES else ""
        raise RequestError(
            f"DST is {name}, which holds {shown}{more}, not of a model that kimik3 writes; give another name"
        )
    if entries and not _has_readable_config(folder):
        raise RequestError(f"DST is {name}, which has no {CONFIG} of a {NESTED} or {FLAT} model; give another name")


def _is_of_a_model(name: str) -> bool:
    return MODEL_FILES.fullmatch(name) is not None or tokenizer_files.is_usual(name)


def _has_readable_config(folder: Path) -> bool:
    try:
        raw, _ = read_configs(folder)
    except CheckpointError:
        return False
    return raw.get("model_type") in (NESTED, FLAT)
