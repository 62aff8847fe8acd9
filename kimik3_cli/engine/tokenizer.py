"""Find, check and wrap a tokenizer. The only importer of transformers; it knows nothing of models."""

import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

from kimik3_cli.errors import RequestError, TokenizerError

FILES = ("tokenizer.json", "tokenizer_config.json")
HUB_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?", flags=re.ASCII)
CONNECT_TIMEOUT_S = 5.0
REMEDY = "give --tokenizer NAME_OR_DIR, or --token-ids instead of --prompt"


class Source(NamedTuple):
    """Where a tokenizer comes from: a folder or a name on the hub, and who said so."""

    name: str
    revision: str | None
    said_by: str


class Tokenizer:
    """Text to token ids and back. No special token is added, and text is never cleaned up."""

    def __init__(self, backend: Any, source: Source) -> None:
        """Wrap a transformers tokenizer."""
        self._backend = backend
        self._source = source

    def check_length(self, vocab_size: int) -> None:
        """Refuse a tokenizer made for another vocabulary.

        Raises:
            TokenizerError: naming both lengths.
        """
        length = len(self._backend)
        if length != vocab_size:
            raise TokenizerError(
                f"{_described(self._source)} has {length} tokens, but the checkpoint's vocab_size is {vocab_size}; "
                "give --tokenizer with the one that the model was trained with"
            )

    @property
    def eos_token_id(self) -> int | None:
        """The id of the tokenizer's end-of-sequence token; 0 is an id like any other."""
        eos: int | None = self._backend.eos_token_id
        return eos

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt.

        Raises:
            RequestError: the text encodes to no token at all.
        """
        ids: list[int] = self._backend.encode(text, add_special_tokens=False)
        if not ids:
            raise RequestError(f"--prompt {text[:40]!r} encodes to no token; give other text or --token-ids")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of generated ids, all decoded at once, special tokens skipped."""
        return self._decode(ids, skip_special_tokens=True)

    def token_text(self, token_id: int) -> str:
        """Return one token's text, special tokens by name; part of a multi-byte character decodes to U+FFFD."""
        return self._decode([token_id], skip_special_tokens=False)

    def _decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text: str = self._backend.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


def find_tokenizer(
    checkpoint: Path, entry: tuple[str, str | None] | None, name: str | None, revision: str | None
) -> Source:
    """Decide which tokenizer to use: the one named by flag, else the checkpoint's entry, else files beside it.

    Args:
        checkpoint: the checkpoint file.
        entry: (name_or_path, revision) of the checkpoint's own tokenizer entry, if it has one.
        name: --tokenizer.
        revision: --tokenizer-revision; it takes precedence over the entry's.

    Raises:
        TokenizerError: there is none, or a named folder does not exist.
    """
    if name is not None:
        return _checked(Source(name, revision, "--tokenizer"))
    if entry is not None:
        return _checked(Source(entry[0], revision or entry[1], f"the tokenizer entry of {str(checkpoint)!r}"))
    folder = checkpoint.parent
    if any((folder / file).is_file() for file in FILES):
        return Source(str(folder), None, "the checkpoint's folder")
    raise TokenizerError(f"{str(checkpoint)!r} names no tokenizer and there is no tokenizer.json beside it; {REMEDY}")


def load_tokenizer(source: Source, *, local_files_only: bool = False) -> Tokenizer:
    """Load a tokenizer from a folder or from the hub (its cache when the hub cannot be reached).

    Raises:
        TokenizerError: it cannot be loaded; the message says why, in one line.
    """
    from transformers import AutoTokenizer

    is_folder = Path(source.name).is_dir()
    offline = "" if is_folder else _why_offline(local_files_only)
    try:
        backend = AutoTokenizer.from_pretrained(
            source.name,
            use_fast=True,
            revision=source.revision or "main",
            local_files_only=is_folder or bool(offline),
            trust_remote_code=False,
        )
    except Exception as error:  # the tokenizers library raises bare Exception for a malformed file
        if is_folder:
            found = f"cannot be read ({_reason(error)}); {' or '.join(FILES)} is damaged or missing"
        elif offline:
            found = f"is not in the local cache, and {offline}"
        else:
            found = f"cannot be loaded ({_reason(error)})"
        raise TokenizerError(f"{_described(source)} {found}; {REMEDY}") from error
    return Tokenizer(backend, source)


def _checked(source: Source) -> Source:
    """Refuse at once what can only be a folder and does not exist; asking the hub for it would take a minute."""
    path = Path(source.name)
    if path.is_dir():
        return source
    if path.exists():
        raise TokenizerError(f"{_described(source)} is a file; give the folder that holds it")
    if not HUB_NAME.fullmatch(source.name):
        raise TokenizerError(f"{_described(source)} is a folder that does not exist here; {REMEDY}")
    return source


def _described(source: Source) -> str:
    return f"tokenizer {source.name!r} (from {source.said_by})"


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no details"]
    return f"{type(error).__name__}: {lines[0]}"


def _why_offline(local_files_only: bool) -> str:
    """Say why the hub is not to be asked, if so.

    A quick look at the network comes first, because the hub's client retries a refused connection for most of a minute.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    if local_files_only:
        return "--local-files-only is given"
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    hub = urlsplit(constants.ENDPOINT)
    first_hop = urlsplit(getproxies().get(hub.scheme, constants.ENDPOINT))
    port = first_hop.port or (443 if first_hop.scheme == "https" else 80)
    try:
        socket.create_connection((first_hop.hostname or "", port), CONNECT_TIMEOUT_S).close()
    except OSError:
        return f"{hub.hostname} cannot be reached"
    return ""
