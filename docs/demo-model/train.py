"""Train the bundled Kimi K3 on the arrays that prepare.py wrote, for a fixed time on a CPU.

    torchrun --standalone --nproc-per-node 2 train.py work/ work/run/ --minutes 50

One single-threaded process a core, each with its own part of every batch: unlike two threads in one process they meet
once a step, not at every operation, which matters as soon as anything else runs on the machine.

Writes work/run/log.jsonl, work/run/last.pt (float32, every few minutes, so that a run that is cut off leaves a model)
and at the end work/run/demo.pt (bfloat16): both are ordinary format-7 checkpoints. Every schedule follows the clock,
not a step count, so that the run ends when it should on any machine.
"""

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from kimik3_cli.engine import KimiK3, KimiK3Config
from kimik3_cli.engine.checkpoint.save import save_checkpoint

CONFIG = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 96,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
    "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 3, "head_dim": 64},
    "attn_res_block_size": 2,
    "num_experts": 16,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 160,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_expert_hidden_size": 128,
    "eos_token_id": 0,
    "max_seq_len": 2048,
}
LENGTHS = {256: 0.4, 512: 0.35, 1024: 0.2, 2048: 0.05}  # sequence length -> share of the steps
CONTEXT = 1024  # of the evaluation
WARMUP, DECAY_FROM = 0.02, 0.3  # as fractions of the run
ROUTER_BIAS_STEP = 0.02


# --- data ---


def windows(data: np.ndarray, length: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Windows of length + 1 tokens for ever: each epoch covers the text once, in random order from a random shift."""
    while True:
        starts = np.arange(rng.integers(length), len(data) - length, length)
        for start in rng.permutation(starts):
            yield data[start : start + length + 1]


def batches(data: np.ndarray, tokens_per_step: int, rng: np.random.Generator) -> Iterator[Tensor]:
    """Batches [B, T + 1] of about equally many tokens, T drawn anew for each."""
    sources = {length: windows(data, length, rng) for length in LENGTHS}
    while True:
        length = int(rng.choice(list(LENGTHS), p=list(LENGTHS.values())))
        rows = [next(sources[length]) for _ in range(max(1, tokens_per_step // length))]
        yield torch.from_numpy(np.stack(rows).astype(np.int64))


# --- model ---


def initialise(model: KimiK3) -> None:
    """Unit-gain normal weights; what writes into the residual stream starts small."""
    small = (2 * model.config.num_hidden_layers) ** -0.5
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        owner = parts[-2] if len(parts) > 1 else name
        if owner.endswith("norm") or owner.endswith("layernorm"):
            nn.init.ones_(parameter)
        elif parts[-1] in ("A_log", "e_score_correction_bias") or owner.endswith("res_proj"):
            nn.init.zeros_(parameter)
        elif parts[-1] == "dt_bias":
            parameter.data.copy_(slow_to_fast(model.config))
        elif owner.endswith("conv1d"):
            nn.init.uniform_(parameter, -0.5, 0.5)
        elif owner == "embed_tokens":
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        else:
            gain = small if owner in ("o_proj", "down_proj", "w2", "routed_expert_up_proj") else 1.0
            gain = 0.1 if owner == "f_b_proj" else gain
            nn.init.normal_(parameter, std=gain * parameter.shape[1] ** -0.5)


def slow_to_fast(config: KimiK3Config) -> Tensor:
    """dt_bias [H*K]: the channels of each head forget at rates from about 0.2 % to 45 % a token (g = -5 sigmoid(z))."""
    linear = config.linear_attn_config
    return torch.linspace(-8.0, -2.0, linear.head_dim).repeat(linear.num_heads)


class RouterBalance:
    """Loss-free balancing: experts with too few tokens get a higher selection bias, those with too many a lower one."""

    def __init__(self, model: KimiK3) -> None:
        self.top_k = model.config.num_experts_per_token
        self.counts: dict[nn.Parameter, Tensor] = {}
        for name, module in model.named_modules():
            if name.endswith("block_sparse_moe.gate"):
                module.register_forward_hook(self._count)

    def _count(self, gate: nn.Module, inputs: tuple[Tensor, ...], _output: object) -> None:
        if not gate.training:
            return
        with torch.no_grad():
            x = inputs[0].reshape(-1, inputs[0].shape[-1]).float()
            scores = torch.sigmoid(x @ gate.weight.T) + gate.e_score_correction_bias
            chosen = scores.topk(self.top_k, dim=-1).indices
            self.counts[gate.e_score_correction_bias] = torch.bincount(chosen.flatten(), minlength=scores.shape[-1])

    @torch.no_grad()
    def update(self, rate: float) -> float:
        """Move every bias by at most `rate`; return the load of the busiest expert, relative to an even share."""
        worst = 1.0
        for bias, count in self.counts.items():
            distributed.all_reduce(count)
            mean = count.float().mean()
            bias += rate * ((mean - count) / mean).clamp(-1, 1)
            bias -= bias.mean()
            worst = max(worst, (count.max() / mean).item())
        return worst


# --- optimizer ---


def orthogonalise(matrices: Tensor) -> Tensor:
    """Newton-Schulz iteration on a stack [n, r, c]: singular values go to about 1 (Muon's quintic coefficients)."""
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; matrices of one shape are worked on as one stack."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            stacks: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                stacks[parameter.shape].append(parameter)
            for parameters in stacks.values():
                self._step_stack(parameters, group["lr"], group["momentum"], group["weight_decay"])

    def _step_stack(self, parameters: list[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        gradients = [parameter.grad for parameter in parameters]
        buffers = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in parameters]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        momenta = torch.stack(torch._foreach_lerp(gradients, buffers, momentum))
        updates = torch.zeros_like(momenta)
        share = slice(distributed.get_rank(), None, distributed.get_world_size())
        updates[share] = orthogonalise(momenta[share])
        distributed.all_reduce(updates)  # each process has worked on its share of the stack
        rows, columns = parameters[0].shape
        torch._foreach_mul_(parameters, 1 - lr * weight_decay)
        torch._foreach_add_(parameters, list(updates.unbind()), alpha=-lr * max(1.0, rows / columns) ** 0.5)


def make_optimizers(model: KimiK3, muon_lr: float, adam_lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices; AdamW for the embedding, the router and everything with one real dimension."""
    hidden, embedding, rest = [], [], []
    for name, parameter in model.named_parameters():
        if name.endswith("e_score_correction_bias"):
            parameter.requires_grad_(False)
        elif "embed_tokens" in name or "lm_head" in name:
            embedding.append(parameter)
        elif parameter.ndim == 2 and parameter.shape[0] > 1 and not name.endswith("gate.weight"):
            hidden.append(parameter)
        else:
            rest.append(parameter)
    groups = [{"params": embedding, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimizers = [
        Muon(hidden, lr=muon_lr, momentum=0.95, weight_decay=weight_decay),
        torch.optim.AdamW(groups, lr=adam_lr, betas=(0.9, 0.97), eps=1e-10),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def learning_rate(done: float) -> float:
    """Linear warm-up, plateau, linear decay to zero; `done` is the fraction of the run's time that has passed."""
    return max(0.0, min(1.0, done / WARMUP, (1 - done) / (1 - DECAY_FROM)))


# --- evaluation ---


@torch.no_grad()
def bits_per_byte(model: KimiK3, ids: np.ndarray, n_bytes: int, every: int = 1) -> float:
    """Negative log2 likelihood of the held-out text per byte of it; every token has 512 to 1024 tokens of context.

    The text is scored in pieces of CONTEXT / 2 tokens, each behind the CONTEXT / 2 tokens before it (the first behind
    <|endoftext|> alone). With `every` > 1 only every so many pieces are scored: an estimate from part of the text.
    """
    model.eval()
    half = CONTEXT // 2
    tokens = torch.from_numpy(ids.astype(np.int64))
    total, scored = 0.0, 0
    for first in range(0, len(tokens) - 1, half * every):
        begin, end = max(0, first - half), min(first + half, len(tokens) - 1)
        logits = model(tokens[None, begin:end])[0, first - begin :].float()
        total += functional.cross_entropy(logits, tokens[first + 1 : end + 1], reduction="sum").item()
        scored += end - first
    model.train()
    return total / scored * (len(tokens) - 1) / n_bytes / math.log(2)


# --- run ---


class Clock:
    """Seconds since the start, the same in every process, so that all follow one schedule and stop together."""

    def __init__(self) -> None:
        self.started = time.monotonic()

    def seconds(self) -> float:
        now = torch.tensor([time.monotonic() - self.started])
        average([now])
        return now.item()


@dataclass
class Run:
    """What the loop needs, in one place."""

    model: KimiK3
    folder: Path
    heldout: np.ndarray
    heldout_bytes: int
    budget: float
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def log(self, **values: float) -> None:
        line = {"step": self.step, "seconds": self.seconds, "tokens": self.tokens, **values}
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps({key: round(value, 5) for key, value in line.items()}) + "\n")

    def save(self, name: str) -> None:
        save_checkpoint(self.folder / name, self.model, step=self.step, tokens_seen=self.tokens)


def average(tensors: list[Tensor]) -> None:
    """Replace every tensor by its mean over the processes."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    distributed.all_reduce(flat)
    flat /= distributed.get_world_size()
    torch._foreach_copy_(
        tensors, [part.view_as(t) for part, t in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True)]
    )


def train_step(model: KimiK3, batch: Tensor, optimizers: list[torch.optim.Optimizer], scale: float) -> float:
    """One step at `scale` times the peak learning rates; returns the loss in nats per token, nan for a skipped step."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch[:, :-1])
    loss = functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        if parameter.grad is None:  # an expert that no token chose
            parameter.grad = torch.zeros_like(parameter)
    loss = loss.detach()
    average([loss, *(parameter.grad for parameter in trained)])
    if not torch.isfinite(nn.utils.clip_grad_norm_(trained, 1.0)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        return math.nan  # one bad batch must not end the run
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = scale * group["peak_lr"]
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def train(run: Run, data: Iterator[Tensor], optimizers: list[torch.optim.Optimizer], evaluate_every: float) -> None:
    """Step until the time is up. The first process also logs, evaluates and saves."""
    balance, clock = RouterBalance(run.model), Clock()
    losses: list[float] = []
    next_evaluation = evaluate_every
    while (seconds := clock.seconds()) < run.budget:
        run.seconds = seconds
        batch = next(data)
        scale = learning_rate(seconds / run.budget)
        losses.append(train_step(run.model, batch, optimizers, scale))
        busiest = balance.update(ROUTER_BIAS_STEP)
        run.step += 1
        run.tokens += batch[:, 1:].numel() * distributed.get_world_size()
        if distributed.get_rank() > 0:
            continue
        if run.step % 10 == 0:
            run.log(loss=sum(losses) / len(losses), lr_scale=scale, busiest_expert=busiest)
            losses.clear()
        if seconds > next_evaluation:
            run.log(heldout_bpb_estimate=bits_per_byte(run.model, run.heldout, run.heldout_bytes, every=8))
            run.save("last.pt")
            next_evaluation += evaluate_every


def finish(run: Run) -> None:
    """Round the weights to the stored bfloat16, score those on the whole held-out play, and save them."""
    run.save("last.pt")
    run.model.bfloat16()
    run.save("demo.pt")
    run.model.float()
    result = bits_per_byte(run.model, run.heldout, run.heldout_bytes)
    run.log(heldout_bpb=result)
    size = (run.folder / "demo.pt").stat().st_size
    print(f"{run.step} steps, {run.tokens} tokens, held-out {result:.4f} bits per byte, demo.pt {size} bytes")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path, help="the folder that prepare.py wrote")
    parser.add_argument("run", type=Path, help="folder for the log and the checkpoints")
    parser.add_argument("--minutes", type=float, default=50.0)
    parser.add_argument("--tokens-per-step", type=int, default=2048, help="in each process")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--evaluate-minutes", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)  # the same weights in every process
    model = KimiK3(KimiK3Config.from_dict(CONFIG))
    initialise(model)
    if rank == 0:
        args.run.mkdir(parents=True, exist_ok=True)
        (args.run / "log.jsonl").unlink(missing_ok=True)
        print(f"{sum(parameter.numel() for parameter in model.parameters())} parameters", flush=True)
    facts = json.loads((args.work / "data.json").read_text())
    heldout = np.load(args.work / "heldout.npy")
    rng = np.random.default_rng([args.seed, rank])  # other text in every process
    data = batches(np.load(args.work / "train.npy"), args.tokens_per_step, rng)
    optimizers = make_optimizers(model, args.muon_lr, args.adam_lr, args.weight_decay)
    run = Run(model, args.run, heldout, facts["heldout_bytes"], args.minutes * 60)
    train(run, data, optimizers, args.evaluate_minutes * 60)
    if rank == 0:
        finish(run)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
