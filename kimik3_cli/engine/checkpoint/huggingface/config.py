"""config.json of a Hugging Face directory -> KimiK3Config: nested (kimi_k3) or flat (kimi_linear).

The field names are those of the released models, and those that transformers 5 writes for kimi_linear. What a file
leaves out has the default of the released configuration class, not that of a trainer's checkpoint.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kimik3_cli.engine.checkpoint.files import printable_path, read_json
from kimik3_cli.engine.config import KimiK3Config
from kimik3_cli.errors import CheckpointError, ConfigError

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
NESTED, FLAT = "kimi_k3", "kimi_linear"
# An object of our own in a directory that kimik3 has written: keys of `model_config` that win over what the released
# fields say, because no released field can carry them.
OWN_KEY = "kimik3"
# Defaults of the class KimiLinearConfig in the released configuration_kimi_k3.py and configuration_kimi.py; of
# use_full_rank_gate and gate_lower_bound, those of the released modeling_kimi_linear.py.
DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "activation_situ_beta": None,
    "activation_situ_linear_beta": None,
    "attn_res_block_size": None,
    "mla_use_output_gate": False,
    "latent_moe_use_norm": False,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
LINEAR_DEFAULTS: dict[str, Any] = {"use_full_rank_gate": False, "gate_lower_bound": None}
# transformers' names -> the released ones. Its own attribute map makes it write either.
SYNONYMS = {
    "num_experts_per_tok": "num_experts_per_token",
    "num_local_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
    "model_max_length": "max_position_embeddings",
}
LINEAR_SYNONYMS = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
# Keys that only transformers writes, and kimik3 for it: such a file means what transformers computes.
THEIR_KEYS = ("norm_topk_prob", "mlp_layer_types")
LAYER_KINDS = {"linear_attention": "kda_layers", "full_attention": "full_attn_layers"}
FEED_FORWARD_KINDS = {"dense": False, "sparse": True}
# Keys of the outer level of a nested file that are not for the text model: its own part, and what it does not have.
OUTER_KEYS = frozenset(
    {"text_config", "ignore_index", "image_placeholder", "media_placeholder_token_id", "vision_config"}
)
# Keys that may stand at both levels of a nested file, and must agree if they do.
DECIDING_KEYS = frozenset({*KimiK3Config.model_fields, "quantization_config"})
# What transformers writes into every config.json, and decides nothing about the logits of this architecture.
_GENERIC = """
    _attn_implementation _name_or_path add_cross_attention bad_words_ids begin_suppress_tokens
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id id2label is_decoder is_encoder_decoder label2id length_penalty max_length min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores prefix pretraining_tp
    problem_type pruned_heads qk_head_dim remove_invalid_values repetition_penalty return_dict_in_generate
    sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class
    top_k top_p torchscript typical_p use_bfloat16
"""
GENERIC_KEYS = frozenset(_GENERIC.split())
# The one quantisation that is decoded: routed experts of the released K3.
PACKED_METHOD, PACKED_FORMAT = "compressed-tensors", "mxfp4-pack-quantized"
PACKED_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}

Raw = dict[str, Any]


def read_configs(folder: Path) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return the content of config.json, and the end-of-sequence ids of generation_config.json, if there are any.

    Raises:
        CheckpointError: there is no config.json, or one of the files is damaged.
    """
    path = folder / CONFIG
    if not path.exists():
        what = "is a directory without config.json; give a checkpoint file, or a Hugging Face directory"
        raise CheckpointError(f"{printable_path(folder)} {what}")
    raw, generation = read_json(path), folder / GENERATION_CONFIG
    if not isinstance(raw, dict):
        raise ConfigError(f"{printable_path(path)} is a {type(raw).__name__}; it must be an object")
    return raw, _end_ids(generation) if generation.exists() else ()


def _end_ids(path: Path) -> tuple[int, ...]:
    raw = read_json(path)
    ids = raw.get("eos_token_id") if isinstance(raw, dict) else None
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(type(each) is int and each >= 0 for each in listed):
        raise ConfigError(f"{printable_path(path)} has eos_token_id {ids!r}; it must be a token id or a list of them")
    return tuple(listed)


def config_from(raw: Mapping[str, Any]) -> KimiK3Config:
    """Read the content of a config.json.

    Raises:
        ConfigError: with every unknown key and impossible value, each named.
    """
    text = {key: value for key, value in _text_part(raw).items() if key not in GENERIC_KEYS}
    own = text.pop(OWN_KEY, {})
    if not isinstance(own, dict):
        raise ConfigError(f"config.json: {OWN_KEY} is {own!r}; it must be an object")
    _check_quantization(text.pop("quantization_config", None))
    is_theirs = not text.keys().isdisjoint(THEIR_KEYS)
    _rename(text, SYNONYMS)
    if is_theirs:
        _refuse_weight_of_one(text)
    text["linear_attn_config"] = _linear_part(text)
    _take_feed_forward_kinds(text)
    _take_length(text)
    try:
        return KimiK3Config.from_dict({**DEFAULTS, **text, **own})
    except ConfigError as error:
        raise ConfigError(str(error).replace("model_config", "config.json", 1)) from None


def _text_part(raw: Mapping[str, Any]) -> Raw:
    """Return the keys of the text model, those of the outer level of a nested file among them."""
    kind = raw.get("model_type")
    if kind == FLAT:
        return dict(raw)
    if kind != NESTED:
        raise ConfigError(f"config.json has model_type {kind!r}; kimik3 runs {NESTED} and {FLAT}")
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise ConfigError(f"config.json has model_type {NESTED} and no text_config object; copy the file again")
    outer = {key: value for key, value in raw.items() if key not in OUTER_KEYS}
    for key in sorted(outer.keys() & text.keys() & DECIDING_KEYS):
        _agree(key, outer[key], f"text_config.{key}", text[key])
    return {**outer, **text}


def _check_quantization(raw: object) -> None:
    if raw is None:
        return
    config = raw if isinstance(raw, dict) else {}
    groups = config.get("config_groups")
    listed = [each for each in groups.values() if isinstance(each, dict)] if isinstance(groups, dict) else []
    formats = {str(config.get("format")), *(str(each.get("format", PACKED_FORMAT)) for each in listed)}
    if config.get("quant_method") != PACKED_METHOD or formats != {PACKED_FORMAT}:
        found = " ".join([str(config.get("quant_method")), *sorted(formats)])
        raise ConfigError(
            f"config.json: quantization_config is {found}; kimik3 decodes {PACKED_METHOD} {PACKED_FORMAT} only, "
            "so take a directory of bfloat16 weights"
        )
    for each in listed:
        given = each.get("weights")
        weights = given if isinstance(given, dict) else {}
        wrong = {key: weights.get(key) for key, value in PACKED_WEIGHTS.items() if weights.get(key, value) != value}
        if each.get("input_activations") is not None:
            wrong["input_activations"] = each["input_activations"]
        if wrong:
            raise ConfigError(f"config.json: quantization_config has {wrong}; kimik3 decodes {PACKED_WEIGHTS} only")


def _rename(raw: Raw, synonyms: Mapping[str, str], target: Raw | None = None) -> None:
    """Move values to their released names, in the same dictionary or in `target`."""
    target = raw if target is None else target
    for theirs, ours in synonyms.items():
        if theirs in raw:
            value = raw.pop(theirs)
            _agree(theirs, value, ours, target.setdefault(ours, value))


def _agree(name: str, value: object, other: str, other_value: object) -> None:
    if value != other_value:
        raise ConfigError(f"config.json: {name} is {value!r}, but {other} is {other_value!r}; make them agree")


def _refuse_weight_of_one(text: Raw) -> None:
    """Refuse what transformers computes and this architecture does not: one expert, whose weight becomes 1."""
    has_experts = text.get("num_experts") is not None and "sparse" in text.get("mlp_layer_types", ["sparse"])
    if has_experts and text.get("num_experts_per_token") == 1 and text.get("moe_renormalize", True):
        raise ConfigError(
            "config.json: norm_topk_prob (or moe_renormalize) is True with num_experts_per_tok 1; transformers then "
            "gives the one expert the weight 1, and this architecture renormalizes only several"
        )


def _linear_part(text: Raw) -> object:
    """Return linear_attn_config, from itself and from what transformers writes beside or instead of it."""
    given = text.get("linear_attn_config", {})
    if not isinstance(given, dict):
        return given
    linear = {**LINEAR_DEFAULTS, **given}
    _rename(text, LINEAR_SYNONYMS, linear)
    kinds = text.pop("layer_types", None)
    if kinds is not None:
        _check_kinds("layer_types", kinds, LAYER_KINDS)
        for kind, name in LAYER_KINDS.items():
            layers = [number for number, each in enumerate(kinds, start=1) if each == kind]
            _agree("layer_types", layers, f"linear_attn_config.{name}", linear.setdefault(name, layers))
    return linear


def _take_feed_forward_kinds(text: Raw) -> None:
    """Turn mlp_layer_types into first_k_dense_replace and moe_layer_freq, with which it has to agree."""
    kinds = text.pop("mlp_layer_types", None)
    if kinds is None:
        return
    _check_kinds("mlp_layer_types", kinds, FEED_FORWARD_KINDS)
    sparse = [layer for layer, kind in enumerate(kinds) if FEED_FORWARD_KINDS[kind]]
    first = text.setdefault("first_k_dense_replace", sparse[0] if sparse else len(kinds))
    step = text.setdefault("moe_layer_freq", sparse[1] - sparse[0] if len(sparse) > 1 else 1)
    if not (type(first) is int and type(step) is int and step > 0):
        return  # which from_dict refuses
    has_experts = text.get("num_experts") is not None
    wanted = [layer for layer in range(len(kinds)) if has_experts and layer >= first and layer % step == 0]
    if not sparse and wanted:
        # transformers fills in its own numbers of experts for a model that has none
        text |= dict.fromkeys(("num_experts", "num_experts_per_token", "moe_intermediate_size"))
    elif sparse != wanted:
        given = f"num_experts {text.get('num_experts')}, first_k_dense_replace {first} and moe_layer_freq {step}"
        raise ConfigError(
            f"config.json: mlp_layer_types has experts in layers {sparse}, but {given} give them to layers {wanted}; "
            "this architecture has no other pattern than these keys can express"
        )


def _check_kinds(name: str, kinds: object, known: Mapping[str, object]) -> None:
    listed = kinds if isinstance(kinds, list) else [kinds]
    strange = [each for each in listed if not (isinstance(each, str) and each in known)]
    if strange:
        raise ConfigError(f"config.json: {name} holds {strange[0]!r}; it must be a list of {' and '.join(known)}")


def _take_length(text: Raw) -> None:
    """Set max_seq_len to max_position_embeddings."""
    length = text.pop("max_position_embeddings", None)
    if length is not None:
        _agree("max_position_embeddings", length, "max_seq_len", text.setdefault("max_seq_len", length))
    elif "max_seq_len" not in text:
        raise ConfigError("config.json: max_position_embeddings is missing; it has no default")
