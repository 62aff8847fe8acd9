"""Prefill and decoding beside transformers' KimiLinearForCausalLM: same weights, same run, its own cache.

    python tests/bench_transformers.py s-klin m-klin

Prints a row for each size: medians of 5 rounds, the two engines in turn, and the ratio of the medians.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import KimiLinearConfig, KimiLinearForCausalLM
from transformers.utils import logging

from kimik3_cli.engine.allocator import keep_freed_memory
from kimik3_cli.engine.benchmark.random_model import random_model
from kimik3_cli.engine.cache import DecodeCache
from kimik3_cli.engine.config import KimiK3Config
from kimik3_cli.engine.generation import advance
from kimik3_cli.engine.model.decoder import KimiK3

CONTEXT, NEW_TOKENS, REPEATS, THREADS = 512, 32, 5, 2
RENAMED = {
    "block_sparse_moe": "mlp",
    "self_attn.A_log": "self_attn.forget_gate.A_log",
    "self_attn.dt_bias": "self_attn.forget_gate.dt_bias",
    "self_attn.f_": "self_attn.forget_gate.f_",
}


def their_config(config: KimiK3Config) -> KimiLinearConfig:
    same = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "intermediate_size",
        "num_attention_heads",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "q_lora_rank",
        "moe_intermediate_size",
        "routed_scaling_factor",
        "rms_norm_eps",
        "tie_word_embeddings",
        "pad_token_id",
        "topk_group",
        "first_k_dense_replace",
    )
    return KimiLinearConfig(
        **{key: getattr(config, key) for key in same},
        linear_attn_config=config.linear_attn_config.model_dump(),
        num_key_value_heads=config.num_attention_heads,
        num_local_experts=config.num_experts,
        num_experts_per_tok=config.num_experts_per_token,
        n_shared_experts=config.num_shared_experts,
        n_group=config.num_expert_group,
        norm_topk_prob=config.moe_renormalize,
        max_position_embeddings=config.max_seq_len,
        bos_token_id=1,
        eos_token_id=2,
    )


def their_weights(model: KimiK3) -> dict[str, Tensor]:
    """Our parameters under transformers' names: convolutions joined, experts stacked, A_log as [1,1,H,1]."""
    ours, theirs = dict(model.state_dict()), {}
    for layer in range(model.config.num_hidden_layers):
        prefix = f"layers.{layer}."
        if model.config.is_kda(layer):
            attn = f"{prefix}self_attn."
            theirs[f"{attn}conv1d.weight"] = torch.cat([ours.pop(f"{attn}{x}_conv1d.weight") for x in "qkv"])
            ours[f"{attn}A_log"] = ours[f"{attn}A_log"].view(1, 1, -1, 1)
        if model.config.is_moe(layer):
            moe, experts = f"{prefix}block_sparse_moe.experts.", range(model.config.num_experts or 0)
            w1, w2, w3 = ([ours.pop(f"{moe}{e}.w{n}.weight") for e in experts] for n in (1, 2, 3))
            theirs[f"{moe}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(w1, w3, strict=True)])
            theirs[f"{moe}down_proj"] = torch.stack(w2)
    theirs |= ours
    for old, new in RENAMED.items():
        theirs = {name.replace(old, new): tensor for name, tensor in theirs.items()}
    return {name if name.startswith("lm_head") else f"model.{name}": tensor for name, tensor in theirs.items()}


def our_round(model: KimiK3, prompt: list[int]) -> tuple[float, float, Tensor]:
    cache = DecodeCache(model.config, 1, len(prompt) + NEW_TOKENS)
    start = time.perf_counter()
    logits = first = advance(model, prompt, cache)
    prefilled = time.perf_counter()
    for _ in range(NEW_TOKENS):
        logits = advance(model, [int(logits.argmax())], cache)
    return prefilled - start, (time.perf_counter() - prefilled) / NEW_TOKENS, first


def their_round(model: KimiLinearForCausalLM, prompt: list[int]) -> tuple[float, float, Tensor]:
    start = time.perf_counter()
    output = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
    first, prefilled = output.logits[0, -1], time.perf_counter()
    for _ in range(NEW_TOKENS):
        token = output.logits[:, -1:].argmax(-1)
        output = model(token, past_key_values=output.past_key_values, use_cache=True)
    return prefilled - start, (time.perf_counter() - prefilled) / NEW_TOKENS, first


def compare(size: str) -> None:
    ours = random_model(size)
    theirs = KimiLinearForCausalLM(their_config(ours.config)).eval()
    theirs.load_state_dict(their_weights(ours), strict=True)
    prompt = torch.randint(1, ours.config.vocab_size, (CONTEXT,), generator=torch.Generator().manual_seed(0)).tolist()
    engines: dict[str, Callable[[], tuple[float, float, Tensor]]] = {
        "kimik3": lambda: our_round(ours, prompt),
        "transformers": lambda: their_round(theirs, prompt),
    }
    rounds = {name: [engine()] for name, engine in engines.items()}  # the first is the warm-up
    first_logits = [rounds[name][0][2] for name in engines]
    difference = (first_logits[0] - first_logits[1]).abs().max() / first_logits[1].abs().max()
    for _ in range(REPEATS):
        for name, engine in engines.items():
            rounds[name].append(engine())
    print(f"{size}: context {CONTEXT}, {THREADS} threads, fp32; logits differ by {difference:.1e} of the largest")
    prefill, decode = (
        {name: statistics.median(each[part] for each in rounds[name][1:]) for name in engines} for part in (0, 1)
    )
    for name in engines:
        print(
            f"  {name:>12}  prefill {CONTEXT / prefill[name]:8.0f} tokens/s   decode {decode[name] * 1e3:7.2f} ms/token"
        )
    print(
        f"  {'ratio':>12}  prefill {prefill['transformers'] / prefill['kimik3']:8.1f}            "
        f"decode {decode['transformers'] / decode['kimik3']:7.1f}"
    )


if __name__ == "__main__":
    logging.set_verbosity_error()
    torch.set_num_threads(THREADS)
    keep_freed_memory()  # for both: it is a setting of the process
    with torch.inference_mode():
        for requested in sys.argv[1:] or ["s-klin", "m-klin"]:
            compare(requested)
