"""Where the new checkpoint goes: what is refused before anything is read."""

from pathlib import Path

from kimik3_cli.engine.checkpoint.files import printable_path
from kimik3_cli.errors import RequestError

FILE_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")


def check_destination(src: Path, dst: Path, overwrite: bool) -> None:
    """Check that the new file or directory may be written: a directory when `src` is a file, else a file.

    Raises:
        RequestError: there is something that must not be replaced, or no folder to write in.
    """
    name = printable_path(dst)
    if not dst.parent.is_dir():
        raise RequestError(f"DST is {name}; the folder {printable_path(dst.parent)} does not exist")
    if src.is_dir():
        _check_file(name, src, dst)
    elif src.exists():
        _check_directory(name, src, dst)
    if dst.exists() and not overwrite:
        raise RequestError(f"DST is {name}, which exists; give another name, or --overwrite to replace it")


def _check_file(name: str, src: Path, dst: Path) -> None:
    if dst.is_dir():
        raise RequestError(
            f"SRC is the directory {printable_path(src)}, so DST is a file; {name} is a directory: name a file"
        )
    if dst.exists() and not dst.is_file():
        raise RequestError(f"DST is {name}, which is no regular file; give another name")
    if dst.parent.resolve() == src.resolve():
        raise RequestError(f"DST is {name}, inside SRC; give a name in another folder")


def _check_directory(name: str, src: Path, dst: Path) -> None:
    what = f"SRC is the file {printable_path(src)}, so DST is a directory"
    if dst.suffix in FILE_SUFFIXES:
        raise RequestError(f"{what}; {name} is the name of a file: give one without {dst.suffix}")
    if dst.exists() and not dst.is_dir():
        raise RequestError(f"{what}; {name} is a file: name a directory")
    if dst.resolve() in src.resolve().parents:
        raise RequestError(f"DST is {name}, the folder that SRC lies in; give another name")
    if dst.is_dir() and not _is_replaceable(dst):
        raise RequestError(f"DST is {name}, which is no directory of a model and files alone; give another name")


def _is_replaceable(folder: Path) -> bool:
    """Say whether a folder is empty, or a model's directory without folders in it, so that nobody's work is removed."""
    entries = list(folder.iterdir())
    return not entries or ((folder / "config.json").is_file() and all(entry.is_file() for entry in entries))
