"""Which tokenizer is used, and what is said when none can be."""

import json
import socket
import time
from pathlib import Path

import pytest
from tokenizers_for_tests import ALL_BYTES, save_byte_tokenizer

from kimik3_cli.engine import tokenizer as module
from kimik3_cli.engine.tokenizer import Source, Tokenizer, find_tokenizer, load_tokenizer
from kimik3_cli.errors import RequestError, TokenizerError


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytes")
    save_byte_tokenizer(folder, ALL_BYTES)
    return folder


@pytest.fixture(scope="session")
def backend(folder: Path) -> Tokenizer:
    return load_tokenizer(Source(str(folder), None, "--tokenizer"))


def test_the_flag_comes_first_then_the_entry_then_the_folder(folder: Path, tmp_path: Path) -> None:
    checkpoint = folder / "last.pt"
    named = find_tokenizer(checkpoint, ("org/entry", "v1"), "org/flag", None)
    assert named == Source("org/flag", None, "--tokenizer")
    entry = find_tokenizer(checkpoint, ("org/entry", "v1"), None, None)
    assert (entry.name, entry.revision) == ("org/entry", "v1")
    assert find_tokenizer(checkpoint, ("org/entry", "v1"), None, "v2").revision == "v2"
    assert find_tokenizer(checkpoint, None, None, None) == Source(str(folder), None, "the checkpoint's folder")
    with pytest.raises(
        TokenizerError, match=r"names no tokenizer and there is no tokenizer.json beside it; give --tok"
    ):
        find_tokenizer(tmp_path / "last.pt", None, None, None)


@pytest.mark.parametrize("name", ["/none", "./none", "../none", "none/", "~/none", "a/b/c", "none here", ".none"])
def test_a_folder_that_does_not_exist_is_refused_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_connection", lambda *_: pytest.fail("the network was asked"))
    with pytest.raises(TokenizerError) as refused:
        find_tokenizer(Path("last.pt"), None, name, None)
    assert f"tokenizer '{name}' (from --tokenizer) is a folder that does not exist here; give --tokenizer" in str(
        refused.value
    )
    with pytest.raises(
        TokenizerError, match=r"\(from the tokenizer entry of 'last.pt'\) is a folder that does not exist"
    ):
        find_tokenizer(Path("last.pt"), (name, None), None, None)


def test_a_file_is_refused(folder: Path) -> None:
    with pytest.raises(TokenizerError, match="is a file; give the folder that holds it"):
        find_tokenizer(Path("last.pt"), None, str(folder / "tokenizer.json"), None)


@pytest.mark.parametrize("name", ["gpt2", "org/name", "org-1/name_2.x"])
def test_names_of_the_hub_are_left_to_it(name: str) -> None:
    assert find_tokenizer(Path("last.pt"), None, name, "main") == Source(name, "main", "--tokenizer")


def test_an_unreachable_hub_is_one_quick_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its client would retry for most of a minute; here nothing listens, on this machine itself."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(module, "getproxies", dict)
    start = time.monotonic()
    with pytest.raises(TokenizerError) as refused:
        load_tokenizer(Source("nobody/nothing", None, "--tokenizer"))
    assert time.monotonic() - start < 10
    assert str(refused.value).startswith(
        "tokenizer 'nobody/nothing' (from --tokenizer) is not in the local cache, and 127.0.0.1 cannot be reached; give"
    )


def test_local_files_only_never_asks_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_connection", lambda *_: pytest.fail("the network was asked"))
    with pytest.raises(TokenizerError, match="is not in the local cache, and --local-files-only is given; give --tok"):
        load_tokenizer(Source("nobody/nothing", None, "--tokenizer"), local_files_only=True)


def test_offline_mode_never_asks_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_connection", lambda *_: pytest.fail("the network was asked"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(TokenizerError, match="is not in the local cache, and HF_HUB_OFFLINE is set; give --tokenizer"):
        load_tokenizer(Source("nobody/nothing", None, "--tokenizer"))


def without(folder: Path, key: str) -> str:
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    del content[key]
    return json.dumps(content)


@pytest.mark.parametrize("damage", ["", "{", "{}", "[]", "model", "added_tokens", "\x00"])
def test_a_damaged_tokenizer_is_a_tokenizer_error(folder: Path, tmp_path: Path, damage: str) -> None:
    """The libraries raise whatever comes, bare Exception among it."""
    content = without(folder, damage) if damage in ("model", "added_tokens") else damage
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes())
    with pytest.raises(TokenizerError) as refused:
        load_tokenizer(Source(str(tmp_path), None, "--tokenizer"))
    assert "cannot be read (" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_empty_folder_is_a_tokenizer_error(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="damaged or missing; give --tokenizer NAME_OR_DIR, or --token-ids"):
        load_tokenizer(Source(str(tmp_path), None, "--tokenizer"))


def test_code_that_comes_with_a_tokenizer_runs_only_when_it_is_trusted(folder: Path, tmp_path: Path) -> None:
    """Nor does anybody ask on the terminal whether it should run."""
    ran = tmp_path / "ran"
    code = f"""
from transformers import PreTrainedTokenizerFast
open({str(ran)!r}, "w")
class Own(PreTrainedTokenizerFast): pass
"""
    (tmp_path / "own.py").write_text(code, encoding="utf-8")
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    source = Source(str(tmp_path), None, "--tokenizer")
    with pytest.raises(
        TokenizerError, match="comes with Python code that it needs; --trust-remote-code runs that code"
    ):
        load_tokenizer(source)
    assert not ran.exists()
    assert load_tokenizer(source, trust_remote_code=True).decode([1, 2]) == "ab"
    assert ran.exists()


def test_text_survives(backend: Tokenizer) -> None:
    """No token is added, nothing is tidied up, characters of several tokens come back whole."""
    for text in ("a", " ", "\n", "日本 🙂 é", "it 's , so .", "  two  spaces  "):
        ids = backend.encode(text)
        assert len(ids) == len(text.encode())
        assert backend.decode(ids) == text


def test_special_tokens_are_skipped_in_text_and_named_alone(backend: Tokenizer) -> None:
    assert backend.eos_token_id == 0
    assert backend.decode([1, 0, 2]) == "ab"
    assert backend.token_text(0) == "<|end|>"
    assert backend.token_text(27) == " "
    assert backend.token_text(backend.encode("é")[0]) == "\ufffd"


def test_length_is_checked(backend: Tokenizer) -> None:
    assert backend.check_length(ALL_BYTES) is None
    with pytest.raises(TokenizerError, match="has 257 tokens, but the checkpoint's vocab_size is 64; give --tokenizer"):
        backend.check_length(64)


def test_a_padded_vocabulary_has_to_be_allowed(backend: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match=r"is 300; give .*, or --allow-vocab-padding if the vocabulary was padded"):
        backend.check_length(300)
    assert backend.check_length(300, allow_padding=True) == list(range(ALL_BYTES))
    assert backend.check_length(ALL_BYTES, allow_padding=True) is None
    with pytest.raises(TokenizerError, match="has 257 tokens, but the checkpoint's vocab_size is 256") as longer:
        backend.check_length(256, allow_padding=True)
    assert "--allow-vocab-padding" not in str(longer.value)


def test_a_prompt_of_no_token_is_refused(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path, 64)
    small = load_tokenizer(Source(str(tmp_path), None, "--tokenizer"))
    with pytest.raises(RequestError, match="--prompt '123' encodes to no token; give other text or --token-ids"):
        small.encode("123")
