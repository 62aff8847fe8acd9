"""Text of tokens as they come: its parts add up to one decode of all of them, whatever the tokenizer and the ids."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Core
from transformers import PreTrainedTokenizerFast

from kimik3_cli.engine.tokenizer import CONTEXT, Source, Tokenizer

SPECIAL = ["<s>", "</s>"]
# A combining accent, a joiner, a flag, a skin tone, a replacement character that is really meant, spaces, controls.
CHARACTERS = ["e", "\u0301", "\u200d", "🇫", "🇷", "👍", "🏽", "日", "本", "\ufffd", "é", " ", "\n", "\x1b", "\u2028", "\x00"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> Core:
    """All single bytes, and tokens that end or begin inside a character."""
    text = "日本🙂é the\ufffd\u0301"
    data = text.encode()
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    whole = alphabet.pre_tokenize_str(text)[0][0]
    assert len(whole) == len(data)
    pieces = {whole[start : start + size] for size in (2, 3, 5) for start in range(len(whole) - size)}
    core = Core(models.BPE(vocab=numbered([*pre_tokenizers.ByteLevel.alphabet(), *sorted(pieces)]), merges=[]))
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL)
    core.add_tokens([AddedToken("日本 word", normalized=False)])
    return core


def numbered(tokens: Sequence[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(dict.fromkeys(tokens))}


def words_with(mark: str, decoder: Any, *more: str) -> Core:
    """Words that begin with a mark for a space, the mark itself, doubled, single characters, and `more`."""
    words = [mark, mark * 2, mark + "a", mark + "the", "b", "ing", mark + "é" + mark, *CHARACTERS, *more]
    core = Core(models.BPE(vocab=numbered(words), merges=[], byte_fallback=bool(more)))
    core.decoder = decoder
    core.add_special_tokens(SPECIAL)
    return core


def metaspace(scheme: str) -> Core:
    return words_with("▁", decoders.Metaspace(prepend_scheme=scheme))


def byte_fallback(*last: Any) -> Core:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    return words_with("▁", decoders.Sequence(steps), *BYTES)


def wordpiece() -> Core:
    vocab = numbered(["un", "##aff", "##able", ".", "don", "'", "t", "n't", "##", *CHARACTERS])
    core = Core(models.WordPiece(vocab, unk_token="un"))
    core.decoder = decoders.WordPiece(cleanup=True)
    core.add_special_tokens(SPECIAL)
    return core


def suffixed() -> Core:
    return words_with("</w>", decoders.BPEDecoder(suffix="</w>"), "low</w>", "est</w>")


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


def wrapped(core: Core) -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=core), Source("made here", None, "a test"))


TOKENIZERS = {name: wrapped(make()) for name, make in MAKERS.items()}
SIZES = {name: make().get_vocab_size() for name, make in MAKERS.items()}


def parts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """One part for each id and one for the end."""
    stream = tokenizer.stream()
    return [*(stream.push(token_id) for token_id in ids), stream.finish()]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_parts_add_up_to_one_decode_of_all_ids(name: str, data: st.DataObject) -> None:
    """Ids beyond the vocabulary are there too: a vocabulary may have holes."""
    anything = st.integers(0, SIZES[name] + 1)
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
        ids += data.draw(st.sampled_from([[], [], [], [special_id(name)]])) + [byte_id(name, byte)]
    found = parts(tokenizer, ids)
    assert "".join(found) == text == tokenizer.decode(ids)
    assert "".join(found).count("\ufffd") == text.count("\ufffd")


def special_id(name: str) -> int:
    found = MAKERS[name]().token_to_id(SPECIAL[0])
    assert found is not None
    return found


def byte_id(name: str, byte: int) -> int:
    spellings = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelling = f"<0x{byte:02X}>" if name == "byte fallback" else _spelled(spellings, byte)
    found = CORES[name].token_to_id(spelling)
    assert found is not None
    return found


def _spelled(spellings: Any, byte: int) -> str:
    """The byte-level spelling of a byte: of itself below 128, else out of a character that contains it."""
    if byte < 128:
        return spellings.pre_tokenize_str(chr(byte))[0][0]
    if byte < 192:
        return spellings.pre_tokenize_str(bytes([0xC2, byte]).decode())[0][0][1]
    first = bytes([byte, *{0xE0: [0xA0], 0xF0: [0x90]}.get(byte, [0x80]), *[0x80] * ((byte >= 0xE0) + (byte >= 0xF0))])
    return spellings.pre_tokenize_str(first.decode())[0][0][0]


CORES = {name: MAKERS[name]() for name in ("byte level", "byte fallback")}


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
@pytest.mark.parametrize("token_id", [0, 3, -1])
def test_a_token_costs_the_same_however_long_the_text(name: str, token_id: int) -> None:
    """For bad bytes that never end as well (id 3 of byte level, the last of byte fallback, again and again)."""
    tokenizer = Counting(TOKENIZERS[name]._backend, Source("made here", None, "a test"))
    count = 500
    ids = [token_id % SIZES[name]] * count
    text = "".join(parts(tokenizer, ids))
    assert tokenizer.decoded <= count * 5 * CONTEXT
    assert text == tokenizer.decode(ids)
