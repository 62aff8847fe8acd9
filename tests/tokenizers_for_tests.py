"""Byte-level tokenizers of any size, saved the way Hugging Face tokenizers are."""

import json
import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

EOS = "<|end|>"
ALL_BYTES = 257
# Bytes in the order in which a small vocabulary takes them; byte-level tokenizers write a space as Ġ, a newline as Ċ.
FIRST = [*string.ascii_lowercase, "Ġ", *string.ascii_uppercase, *"'.,;:!?-", "Ċ"]


def save_byte_tokenizer(folder: Path, size: int, eos: str | None = EOS) -> None:
    """Write a tokenizer of `size` tokens: <|end|> is 0, the others are single bytes; 257 tokens cover all bytes.

    With `eos` None the token is there, but the tokenizer does not call it the end.
    """
    others = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(FIRST))
    tokens = [EOS, *FIRST, *others][:size]
    assert len(tokens) == size
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **({"eos_token": eos} if eos else {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
