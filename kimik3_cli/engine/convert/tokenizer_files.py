"""The files of a tokenizer: found beside a checkpoint or in the folder that it names, and copied. No transformers."""

import shutil
from pathlib import Path

from kimik3_cli.engine.replacing import sync
from kimik3_cli.results import TokenizerEntry

# Beginnings of the names of files that tokenizers consist of, code of their own (tokenization_*.py) included.
NAMES = (
    "tokenizer",
    "tokenization",
    "special_tokens_map",
    "added_tokens",
    "vocab",
    "merges",
    "chat_template",
    "tiktoken",
)
USUAL_SUFFIXES = (".json", ".model", ".jinja", ".py", ".tiktoken")
USUAL_TEXTS = ("vocab.txt", "merges.txt")
NEEDED = ("tokenizer", "tiktoken")


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of the tokenizer in a folder, by name; none when there is no tokenizer."""
    files = sorted(path for path in folder.iterdir() if path.name.startswith(NAMES) and path.is_file())
    return files if any(path.name.startswith(NEEDED) for path in files) else []


def is_usual(name: str) -> bool:
    """Say whether a file of this name is a tokenizer's and nobody's notes about one."""
    return name in USUAL_TEXTS or (name.startswith(NAMES) and name.endswith(USUAL_SUFFIXES))


def files_of_checkpoint(checkpoint: Path, entry: TokenizerEntry | None) -> list[Path]:
    """Return the files of a checkpoint's own tokenizer: in the folder that its entry names, else beside it.

    None when the entry is a name on the hub.
    """
    if entry is None:
        return tokenizer_files(checkpoint.parent)
    folder = Path(entry.name_or_path)
    return tokenizer_files(folder) if folder.is_dir() else []


def copy(files: list[Path], folder: Path) -> None:
    """Copy files into a folder."""
    for path in files:
        shutil.copyfile(path, folder / path.name)
        sync(folder / path.name)
