"""Trains the model on the rows that corpus.py wrote and writes a checkpoint.

    python train.py TOKENIZER_FOLDER DATA_FOLDER OUTPUT_FOLDER (--steps N | --minutes M)

Every step takes a batch of long rows (stories, conversations, records) and one of short rows (sums); the two mean
losses are added. Matrices are trained with Muon (momentum, orthogonalized by a Newton-Schulz iteration), the rest
with Adam.
"""

from __future__ import annotations

import argparse
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import corpus
import numpy as np
import sums
import torch
import torch.nn.functional as functional
from network import Network, Shape, write_checkpoint
from tokenizers import Tokenizer
from torch import Tensor

WARMUP_STEPS, CALIBRATION_STEPS = 100, 120


class Muon:
    """The Muon optimizer (Jordan et al., 2024): momentum with an orthogonalized update. Matrices of one shape are
    updated together.
    """

    def __init__(self, matrices: list[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.02):
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        shapes = sorted({tuple(m.shape) for m in matrices})
        self.groups = [[m for m in matrices if tuple(m.shape) == shape] for shape in shapes]
        self.buffers = [torch.zeros(len(g), *g[0].shape, device=g[0].device) for g in self.groups]
        self.update = muon_update

    @torch.no_grad()
    def step(self, scale: float) -> None:
        for group, buffer in zip(self.groups, self.buffers):
            gradient = torch.stack([m.grad for m in group])
            rows, columns = gradient.shape[1:]
            update = self.update(gradient, buffer, self.momentum)
            rate = self.lr * scale
            torch._foreach_mul_(group, 1 - rate * self.weight_decay)
            torch._foreach_add_(group, list(update.unbind()), alpha=-rate * math.sqrt(max(1.0, rows / columns)))


def muon_update(gradient: Tensor, buffer: Tensor, momentum: float) -> Tensor:
    """The orthogonalized Nesterov update of a stack of matrices; changes the momentum buffer."""
    buffer.lerp_(gradient, 1 - momentum)
    x = gradient.lerp(buffer, momentum)
    x = x.bfloat16() if x.is_cuda else x
    transposed = x.shape[1] > x.shape[2]
    if transposed:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        product = x @ x.mT
        x = 3.4445 * x + (-4.7750 * product + 2.0315 * product @ product) @ x
    return (x.mT if transposed else x).float()


def batches(rows: Tensor, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Endless batches, reshuffled after each pass."""
    while True:
        order = torch.randperm(rows.shape[0], generator=generator, device=rows.device)
        for start in range(0, len(order) - size + 1, size):
            yield rows[order[start:start + size]]


def loss_of(network: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Mean loss over the trained tokens. rows [batch, length + 1]: token ids, or -1 - id for a token without a loss."""
    tokens = rows.long()
    ids = torch.where(tokens < 0, -1 - tokens, tokens)
    targets = torch.where(tokens < 0, -100, tokens)[:, 1:]
    logits = network(ids[:, :-1])
    return functional.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), targets.reshape(-1),
                                    ignore_index=-100)


def held_out_rows(tokenizer: Tokenizer, count: int) -> Tensor:
    """Held-out sums as short rows, for a score during training."""
    pad = -1 - tokenizer.token_to_id(corpus.END_OF_TEXT)
    rows = np.full((count, 33), pad, dtype=np.int16)
    for row, (a, b, op) in zip(rows, sums.held_out_problems(count)):
        ids = corpus.encode(tokenizer, corpus.chat_document([(f"{a}{op}{b}=?", str(sums.solve(a, b, op)))]))
        row[:len(ids)] = ids
    return torch.from_numpy(rows)


@torch.no_grad()
def exact(network: Callable[[Tensor], Tensor], rows: Tensor) -> float:
    """Share of rows whose tokens with a loss are all predicted, as greedy decoding would generate them."""
    tokens = rows.long()
    ids = torch.where(tokens < 0, -1 - tokens, tokens)
    right = network(ids[:, :-1]).argmax(-1) == ids[:, 1:]
    return (right | (tokens[:, 1:] < 0)).all(1).float().mean().item()


def learning_rate(step: int, steps: int | None) -> float:
    """Warm-up, then constant for the first 30 % of the steps, then linearly to zero."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return warm if steps is None else warm * min(1.0, max(0.0, (steps - step) / (0.7 * steps)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--minutes", type=float, help="choose the number of steps so that training takes this long")
    parser.add_argument("--long-batch", type=int, default=48)
    parser.add_argument("--short-batch", type=int, default=384)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=0.003)
    parser.add_argument("--short-weight", type=float, default=1.0, help="weight of the sums' loss")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    if (args.steps is None) == (args.minutes is None):
        parser.error("give --steps or --minutes")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    network = Network(Shape(vocab_size=tokenizer.get_vocab_size())).to(device)
    matrices = [p for n, p in network.named_parameters() if p.ndim == 2 and n.startswith("layers")]
    others = [p for n, p in network.named_parameters() if p.ndim != 2 or not n.startswith("layers")]
    print(f"{sum(p.numel() for p in network.parameters()):,} parameters on {device}", flush=True)
    muon = Muon(matrices, args.muon_lr)
    adam = torch.optim.Adam(others, lr=args.adam_lr, betas=(0.9, 0.98), fused=device == "cuda")

    generator = torch.Generator(device=device).manual_seed(args.seed)
    long_rows, short_rows = (torch.from_numpy(np.load(args.data / f"{kind}.npy")).to(device) for kind in ("long",
        "short"))
    long_batches = batches(long_rows, args.long_batch, generator)
    short_batches = batches(short_rows, args.short_batch, generator)
    check_rows = held_out_rows(tokenizer, 2000).to(device)

    step_loss = loss_of
    if device == "cuda" and not args.no_compile:
        step_loss = torch.compile(loss_of, dynamic=False)
        muon.update = torch.compile(muon_update, dynamic=False)

    steps, step, started = args.steps, 0, time.monotonic()
    calibration_start = started
    while steps is None or step < steps:
        scale = learning_rate(step, steps)
        for group in adam.param_groups:
            group["lr"] = args.adam_lr * scale
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            long_loss = step_loss(network, next(long_batches))
        long_loss.backward()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            short_loss = step_loss(network, next(short_batches))
        (short_loss * args.short_weight).backward()
        muon.step(scale)
        adam.step()
        network.zero_grad(set_to_none=True)
        step += 1
        if steps is None and step in (CALIBRATION_STEPS // 2, CALIBRATION_STEPS):
            losses = f"{long_loss.item():.3f}"       # waits for the device
            if step == CALIBRATION_STEPS // 2:
                calibration_start = time.monotonic()
            else:
                per_step = (time.monotonic() - calibration_start) / (CALIBRATION_STEPS // 2)
                left = args.minutes * 60 - (time.monotonic() - started)
                steps = step + max(1, int(left / per_step))
                print(f"{per_step * 1e3:.1f} ms a step (loss {losses}): {steps} steps", flush=True)
        if step % 500 == 0 or step == steps:
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                score = exact(network, check_rows)
            print(f"step {step}/{steps} [{time.monotonic() - started:.0f} s] loss {long_loss.item():.4f} long, "
                  f"{short_loss.item():.4f} short; held-out sums {score:.2%}", flush=True)

    write_checkpoint(network, args.output, [tokenizer.token_to_id(t) for t in ("<|im_end|>", corpus.END_OF_TEXT)],
                     tokenizer.token_to_id(corpus.END_OF_TEXT))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if args.tokenizer.resolve() != args.output.resolve():
            shutil.copy(args.tokenizer / name, args.output / name)
    size = sum(f.stat().st_size for f in args.output.iterdir())
    print(f"wrote {args.output}: {size:,} bytes after {steps} steps", flush=True)


if __name__ == "__main__":
    main()
