"""What a model accepts: token ids, lengths, end ids. Torch-free, so that a wrong request is refused before loading."""

from collections.abc import Sequence

from kimik3_cli.engine.config import KimiK3Config
from kimik3_cli.errors import RequestError

FALLBACK_EOS_ID = 0


def shortened(config: KimiK3Config, max_seq_len: int | None) -> KimiK3Config:
    """Return the same architecture with a shorter context, in tokens; None leaves it as it is.

    Raises:
        RequestError: it is longer than what the model was made for, or no positive number.
    """
    if max_seq_len is None:
        return config
    if type(max_seq_len) is not int or not 1 <= max_seq_len <= config.max_seq_len:
        raise RequestError(f"--max-seq-len is {max_seq_len!r}; the checkpoint allows 1 to {config.max_seq_len}")
    return config.model_copy(update={"max_seq_len": max_seq_len})


def check_token_id(config: KimiK3Config, token_id: object, name: str) -> int:
    """Return a valid token id.

    Raises:
        RequestError: it is not an integer (a bool is none, nor is 7.0) or not in the vocabulary.
    """
    if type(token_id) is not int:
        raise RequestError(f"{name} is {token_id!r}; give an integer token id")
    if not 0 <= token_id < config.vocab_size:
        raise RequestError(f"{name} is {token_id}; the vocabulary has ids 0 to {config.vocab_size - 1}")
    return token_id


def check_prompt(config: KimiK3Config, token_ids: Sequence[object], pad_id: object = None) -> tuple[list[int], int]:
    """Return the prompt's ids and the pad id (None: the configuration's), all valid.

    Raises:
        RequestError: empty prompt, an invalid id, or more tokens than max_seq_len.
    """
    if not isinstance(token_ids, list | tuple):
        raise RequestError(f"the prompt is a {type(token_ids).__name__}; give a list of integer token ids")
    if not token_ids:
        raise RequestError("the prompt is empty; give at least one token id")
    ids = [check_token_id(config, token_id, "a prompt token id") for token_id in token_ids]
    if len(ids) > config.max_seq_len:
        raise RequestError(f"the prompt has {len(ids)} tokens; the model's max_seq_len is {config.max_seq_len}")
    return ids, check_token_id(config, config.pad_token_id if pad_id is None else pad_id, "--pad-id")


def padded_length(config: KimiK3Config, length: int) -> int:
    """Length that the stateless pass computes: the chunkwise backend fills the last KDA chunk.

    Raises:
        RequestError: the filled length exceeds max_seq_len.
    """
    if config.kda_backend != "chunkwise" or not config.linear_attn_config.kda_layers:
        return length
    padded = -(-length // config.kda_chunk_size) * config.kda_chunk_size
    if padded > config.max_seq_len:
        raise RequestError(
            f"{length} tokens fill {padded} with kda_chunk_size {config.kda_chunk_size}, "
            f"but max_seq_len is {config.max_seq_len}; shorten the prompt or the continuation"
        )
    return padded


def check_generation(
    config: KimiK3Config,
    prompt_ids: Sequence[object],
    max_new_tokens: object,
    pad_id: object = None,
    use_cache: bool = True,
) -> tuple[list[int], int]:
    """Check that a whole request fits before anything is computed; return what `check_prompt` returns.

    Raises:
        RequestError: see `check_prompt`; or the request needs more than max_seq_len, which without a cache includes the
            padding of `padded_length`.
    """
    ids, pad = check_prompt(config, prompt_ids, pad_id)
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise RequestError(f"--max-new-tokens is {max_new_tokens!r}; give an integer, 1 or more")
    total = len(ids) + max_new_tokens
    if total > config.max_seq_len:
        raise RequestError(
            f"{len(ids)} prompt tokens + --max-new-tokens {max_new_tokens} = {total}; "
            f"the model's max_seq_len is {config.max_seq_len}"
        )
    if not use_cache:
        padded_length(config, total - 1)
    return ids, pad


def eos_ids(config: KimiK3Config, eos_id: int | Sequence[int] | None) -> frozenset[int]:
    """Return the valid ids that end a text: the given ones, else the configuration's, else 0.

    Raises:
        RequestError: an id is not in the vocabulary.
    """
    if eos_id is None:
        eos_id = config.eos_token_ids or FALLBACK_EOS_ID
    given = [eos_id] if isinstance(eos_id, int) else eos_id
    return frozenset(check_token_id(config, each, "--eos-id") for each in given)
