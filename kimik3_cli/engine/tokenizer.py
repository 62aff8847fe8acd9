"""Find, check and wrap a tokenizer. The only importer of transformers; it knows nothing of models."""

import logging
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

from kimik3_cli.errors import RequestError, TokenizerError

FILES = ("tokenizer.json", "tokenizer_config.json")
OTHER_FILES = ("tiktoken.model", "tokenizer.model")
HUB_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?", flags=re.ASCII)
CONNECT_TIMEOUT_S = 5.0
CONTEXT = 8  # tokens that decide how the next one reads; a character has at most 4 bytes
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
REPLACEMENT = "\ufffd"
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

    def check_length(self, vocab_size: int, *, allow_padding: bool = False) -> list[int] | None:
        """Refuse a tokenizer made for another vocabulary.

        Args:
            vocab_size: of the checkpoint.
            allow_padding: the vocabulary may have ids that the tokenizer does not have.

        Returns:
            The ids of the tokenizer in ascending order if some of the vocabulary are not among them, else None.

        Raises:
            TokenizerError: naming both lengths.
        """
        length = len(self._backend)
        if allow_padding:
            ids = sorted(set(self._backend.get_vocab().values()))
            if ids[-1] < vocab_size:
                return ids if len(ids) < vocab_size else None
            length = max(length, ids[-1] + 1)
        if length != vocab_size:
            padded = ", or --allow-vocab-padding if the vocabulary was padded" if length < vocab_size else ""
            raise TokenizerError(
                f"{_described(self._source)} has {length} tokens, but the checkpoint's vocab_size is {vocab_size}; "
                f"give --tokenizer with the one that the model was trained with{padded}"
            )
        return None

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
        ids: list[int] = self._backend.encode(text, add_special_tokens=False, verbose=False)
        if not ids:
            raise RequestError(f"--prompt {text[:40]!r} encodes to no token; give other text or --token-ids")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of generated ids, all decoded at once, special tokens skipped."""
        return self._decode(ids, skip_special_tokens=True)

    def token_text(self, token_id: int) -> str:
        """Return one token's text, special tokens by name; part of a multi-byte character decodes to U+FFFD."""
        return self._decode([token_id], skip_special_tokens=False)

    def stream(self) -> "TextStream":
        """Begin to decode ids that come one by one."""
        return TextStream(self)

    def is_silent(self, token_id: int) -> bool:
        """Say whether a token leaves no text, whatever is around it, as special tokens do."""
        return not self.decode([token_id] * CONTEXT)

    def is_byte(self, token_id: int) -> bool:
        """Say whether a token is a byte spelled out, such as <0x0A>, for characters that the vocabulary lacks."""
        spelling: str | None = self._backend.convert_ids_to_tokens(token_id)
        return BYTE_TOKEN.fullmatch(spelling or "") is not None

    def _decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text: str = self._backend.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


class TextStream:
    """The text of token ids that come one by one, each part as soon as no later token can change it.

    All parts together are exactly what `Tokenizer.decode` makes of all ids at once, provided that how a token reads
    depends only on whether it is the first or the last, on the CONTEXT tokens before it, and on the run of byte tokens
    that it belongs to. This holds for byte-level, Metaspace, WordPiece, byte-fallback and suffix decoders. A token
    costs a decode of at most 2 * CONTEXT tokens, a run of byte tokens one decode at its end.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Begin an empty text."""
        self._tokenizer = tokenizer
        self._window: list[int] = []  # the latest tokens, silent ones left out
        self._returned = 0  # characters of the window's text

    def push(self, token_id: int) -> str:
        """Return the text that this token has made certain; may be empty."""
        if self._tokenizer.is_silent(token_id):
            return ""
        self._window.append(token_id)
        if self._tokenizer.is_byte(token_id):  # one bad byte can make U+FFFD of its whole run
            return ""
        text = self._tokenizer.decode(self._window)
        part = self._take(text.removesuffix(REPLACEMENT))  # the last one may be the beginning of a character
        if len(self._window) >= 2 * CONTEXT:
            pending = len(text) - self._returned
            self._window = self._window[-CONTEXT:]
            self._returned = len(self._tokenizer.decode(self._window)) - pending
        return part

    def finish(self) -> str:
        """Return the text that waited for a token that never came."""
        return self._take(self._tokenizer.decode(self._window))

    def _take(self, text: str) -> str:
        part = text[self._returned :]
        self._returned += len(part)
        return part


def find_tokenizer(
    checkpoint: Path, entry: tuple[str, str | None] | None, name: str | None, revision: str | None
) -> Source:
    """Decide which tokenizer to use: the one named by flag, else the checkpoint's entry, else files with it.

    Args:
        checkpoint: the checkpoint: a directory may hold the tokenizer's files, a file may have them beside it.
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
    folder, where = (checkpoint, "in") if checkpoint.is_dir() else (checkpoint.parent, "beside")
    if any((folder / file).is_file() for file in (*FILES, *OTHER_FILES)):
        return Source(str(folder), None, "the checkpoint's folder")
    missing = f"names no tokenizer and there is no tokenizer.json {where} it"
    raise TokenizerError(f"{str(checkpoint)!r} {missing}; {REMEDY}")


def load_tokenizer(source: Source, *, local_files_only: bool = False, trust_remote_code: bool = False) -> Tokenizer:
    """Load a tokenizer from a folder or from the hub (its cache when the hub cannot be reached).

    Args:
        source: where it is.
        local_files_only: never ask the hub.
        trust_remote_code: run the Python code that comes with it, if it needs any.

    Raises:
        TokenizerError: it cannot be loaded; the message says why, in one line.
    """
    from transformers import AutoTokenizer

    is_folder = Path(source.name).is_dir()
    offline = "" if is_folder else _why_offline(local_files_only)
    try:
        with _silent_about_models():
            backend = AutoTokenizer.from_pretrained(
                source.name,
                use_fast=True,
                revision=source.revision or "main",
                local_files_only=is_folder or bool(offline),
                trust_remote_code=trust_remote_code,
            )
    except Exception as error:  # the tokenizers library raises bare Exception for a malformed file
        if not trust_remote_code and "trust_remote_code" in str(error):
            found = "comes with Python code that it needs; --trust-remote-code runs that code, if you trust its author"
        elif is_folder:
            found = f"cannot be read ({_reason(error)}); {' or '.join(FILES)} is damaged or missing"
        elif offline:
            found = f"is not in the local cache, and {offline}"
        else:
            found = f"cannot be loaded ({_reason(error)})"
        raise TokenizerError(f"{_described(source)} {found}; {REMEDY}") from error
    return Tokenizer(backend, source)


@contextmanager
def _silent_about_models() -> Iterator[None]:
    """Let transformers not warn that the model whose config.json lies beside a tokenizer is none of its own."""
    logger = logging.getLogger("transformers.configuration_utils")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


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
