"""Text of tokens as they come: its parts add up to one decode of all of them, whatever the tokenizer and the ids."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Core
from transformers import PreTrainedTokenizerFast

from kimik3_cli.engine.tokenizer import CONTEXT, Source, Tokenizer

SPECIAL = ["<s>", "</s>"]
# A combining accent, a joiner, a flag, a skin tone, a replacement character that is really meant, spaces, controls.
CHARACTERS = list("e\u0301\u200d🇫🇷👍🏽日本\ufffdé \n\x1b\u2028\x00")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# Byte-level tokenizers write a byte as the character of that code if that can be seen, else as one from 256 on.
SEEN = [*range(33, 127), *range(161, 173), *range(174, 256)]
UNSEEN = [byte for byte in range(256) if byte not in SEEN]
BYTE_LEVEL = [chr(byte if byte in SEEN else 256 + UNSEEN.index(byte)) for byte in range(256)]


def byte_level() -> Core:
    """All single bytes, and tokens that end or begin inside a character."""
    whole = "".join(BYTE_LEVEL[byte] for byte in "日本🙂é the\ufffd\u0301".encode())
    pieces = {whole[start : start + size] for size in (2, 3, 5) for start in range(len(whole) - size)}
    core = Core(models.BPE(vocab=numbered([*BYTE_LEVEL, *sorted(pieces)]), merges=[]))
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL)
    core.add_tokens([AddedToken("日本 word", normalized=False)])
    return core


def numbered(tokens: Sequence[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(dict.fromkeys(tokens))}


def marked(decoder: Any, *more: str) -> Core:
    """Words that begin with the mark of a space, the mark itself, two of it, single characters, and `more`."""
    words = ["▁", "▁▁", "▁a", "▁the", "b", "ing", "▁é▁", *CHARACTERS, *more]
    core = Core(models.BPE(vocab=numbered(words), merges=[], byte_fallback=bool(more)))
    core.decoder = decoder
    core.add_special_tokens(SPECIAL)
    return core


def metaspace(scheme: str) -> Core:
    return marked(decoders.Metaspace(prepend_scheme=scheme))


def byte_fallback(*last: Any) -> Core:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    return marked(decoders.Sequence(steps), *BYTES)


def wordpiece() -> Core:
    vocab = numbered(["un", "##aff", "##able", ".", "don", "'", "t", "n't", "##", *CHARACTERS])
    core = Core(models.WordPiece(vocab, unk_token="un"))
    core.decoder = decoders.WordPiece(cleanup=True)
    core.add_special_tokens(SPECIAL)
    return core


def suffixed() -> Core:
    words = ["</w>", "a</w>", "the</w>", "b", "ing", *CHARACTERS, *(character + "</w>" for character in CHARACTERS)]
    core = Core(models.BPE(vocab=numbered(words), merges=[]))
    core.decoder = decoders.BPEDecoder(suffix="</w>")
    core.add_special_tokens(SPECIAL)
    return core


MAKERS: dict[str, Callable[[], Core]] = {
    "byte level": byte_level,
    "metaspace always": lambda: metaspace("always"),
    "metaspace first": lambda: metaspace("first"),
    "metaspace never": lambda: metaspace("never"),
    "byte fallback, first space stripped": lambda: byte_fallback(decoders.Strip(" ", 1, 0)),
    "byte fallback, three spaces stripped": lambda: byte_fallback(decoders.Strip(" ", 3, 0)),
    "byte fallback": byte_fallback,
    "wordpiece": wordpiece,
    "suffixes": suffixed,
}


def wrapped(core: Core) -> tuple[PreTrainedTokenizerFast, Source]:
    return PreTrainedTokenizerFast(tokenizer_object=core), Source("made here", None, "a test")


CORES = {name: make() for name, make in MAKERS.items()}
TOKENIZERS = {name: Tokenizer(*wrapped(core)) for name, core in CORES.items()}


def parts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """One part for each id and one for the end."""
    stream = tokenizer.stream()
    return [*(stream.push(token_id) for token_id in ids), stream.finish()]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_parts_add_up_to_one_decode_of_all_ids(name: str, data: st.DataObject) -> None:
    """Ids beyond the vocabulary are there too: a vocabulary may have holes."""
    anything = st.integers(0, CORES[name].get_vocab_size() + 1)
    few = st.sampled_from(data.draw(st.lists(anything, min_size=1, max_size=4)))  # so that runs come up
    ids = data.draw(st.lists(few, max_size=60) | st.lists(anything, max_size=60))
    tokenizer = TOKENIZERS[name]
    assert "".join(parts(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_text_in_single_bytes_comes_in_whole_characters(name: str, data: st.DataObject) -> None:
    """Special tokens may stand inside a character; they are skipped, and so do not break it."""
    text = data.draw(st.text(max_size=30) | st.text(st.sampled_from(CHARACTERS), max_size=30))
    tokenizer, ids = TOKENIZERS[name], []
    for byte in text.encode():
        ids += [*data.draw(st.sampled_from([[], [], [], [special_id(name)]])), byte_id(name, byte)]
    found = parts(tokenizer, ids)
    assert "".join(found) == text == tokenizer.decode(ids)
    assert "".join(found).count("\ufffd") == text.count("\ufffd")


def special_id(name: str) -> int:
    return CORES[name].token_to_id(SPECIAL[0])


def byte_id(name: str, byte: int) -> int:
    return CORES[name].token_to_id(BYTES[byte] if name == "byte fallback" else BYTE_LEVEL[byte])


def test_text_comes_at_once_where_nothing_can_change_it() -> None:
    ids = [byte_id("byte level", byte) for byte in "a日\ufffdb".encode()]
    assert parts(TOKENIZERS["byte level"], ids) == ["a", "", "", "日", "", "", "", "\ufffdb", ""]
    first = CORES["byte fallback"].token_to_id("▁the")
    ids = [first, *(byte_id("byte fallback", byte) for byte in "日\n".encode()), first]
    assert parts(TOKENIZERS["byte fallback"], ids) == [" the", "", "", "", "", "日\n the", ""]


def test_bad_bytes_are_replaced_as_in_one_decode() -> None:
    ids = [byte_id("byte level", byte) for byte in b"\xf0\x9f\x80\x80\xe6\x97a\xff"]
    assert parts(TOKENIZERS["byte level"], ids)[-2:] == ["", "\ufffd"]
    bad_run = [byte_id("byte fallback", byte) for byte in "日".encode() + b"\x80"]
    assert parts(TOKENIZERS["byte fallback"], bad_run) == ["", "", "", "", "\ufffd" * 4]


class Counting(Tokenizer):
    """A tokenizer that notes how many ids it has decoded."""

    decoded = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.decoded += len(ids)
        return super().decode(ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("token_id", [0, 3, 128, 240, -3, -1])
def test_a_token_costs_the_same_however_long_the_text(name: str, token_id: int) -> None:
    """For bad bytes that never end as well, such as 128 of the byte level; ids are taken modulo the vocabulary."""
    tokenizer = Counting(*wrapped(CORES[name]))
    count = 500
    ids = [token_id % CORES[name].get_vocab_size()] * count
    text = "".join(parts(tokenizer, ids))
    assert tokenizer.decoded <= count * 5 * CONTEXT
    assert text == tokenizer.decode(ids)
