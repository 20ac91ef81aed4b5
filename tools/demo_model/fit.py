"""The training loop: one-thread workers compute the chunks of a step, and the gradients are added in order.

So a busy core slows a step instead of stalling it, and the result does not depend on how many workers there are.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from batches import Encoder, batch
from model import Llama
from muon import Muon
from torch import Tensor, nn

CHUNK = 1024
"""Tokens per chunk."""

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Computes the summed loss from tokens, positions and targets, as `batch` returns them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Duration, data and learning rates of a training.

    Rates are full until step `hold`, then fall in a line to 0 at the end. After step `later` the tasks that are slow to
    learn have larger shares; after `long` some rows are long. Tools are offered in the share `tools` of the chunks.
    """

    name: str
    chunks: int
    hold: int
    steps: int
    later: int
    long: int
    tools: float = 0.0
    matrix_rate: float = 0.012
    other_rate: float = 0.003
    warmup: int = 100

    def scale(self, step: int) -> float:
        """Return the factor on the learning rates at a step."""
        return min(1.0, step / self.warmup, (self.steps - step) / (self.steps - self.hold))


def log(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def scores(model: Llama, tokens: Tensor, at: Tensor) -> Tensor:
    """Return 32-bit logits at the given flat positions."""
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        hidden = model(tokens).flatten(0, 1)[at]
        return model.logits(hidden).float()


def fit(
    model: nn.Module,
    encoder: Encoder,
    loss_of: Loss,
    plan: Plan,
    *,
    workers: int,
    checkpoint: Path,
    every: int,
    look: Callable[[int], None],
) -> None:
    """Train in place; write `checkpoint` and call `look` with the step after each `every` steps.

    A run that finds its checkpoint goes on from there and ends as it would have without the stop.
    """
    names = [name for name, _ in model.named_parameters()]
    parameters = [parameter for _, parameter in model.named_parameters()]
    inner = [p.ndim == 2 and n != "embed_tokens.weight" for n, p in zip(names, parameters, strict=True)]
    muon = Muon([p for p, is_inner in zip(parameters, inner, strict=True) if is_inner])
    adam = torch.optim.AdamW(
        [p for p, is_inner in zip(parameters, inner, strict=True) if not is_inner],
        lr=0.0,
        betas=(0.9, 0.98),
        weight_decay=0.0,
    )
    first, seen, spent, recent = 1, 0, 0.0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])
        muon.momenta = state["muon"]
        first, seen, spent, recent = state["step"] + 1, state["seen"], state["spent"], state["recent"]

    def chunk(seed: str, later: bool, long: bool) -> tuple[list[Tensor], float, int, int]:
        torch.set_num_threads(1)
        tokens, at, targets = batch(encoder, seed, CHUNK, later=later, long=long, tools=plan.tools)
        loss = loss_of(tokens, at, targets)
        return list(torch.autograd.grad(loss, parameters)), loss.item(), len(targets), tokens.numel()

    started = time.monotonic() - spent
    with ThreadPoolExecutor(workers) as pool:
        for step in range(first, plan.steps + 1):
            total, targets = 0.0, 0
            seeds = [f"{plan.name} {step} {part}" for part in range(plan.chunks)]
            later, long = [step > plan.later] * plan.chunks, [step > plan.long] * plan.chunks
            for at, (gradients, loss, num_targets, num_tokens) in enumerate(pool.map(chunk, seeds, later, long)):
                if at == 0:
                    for parameter, gradient in zip(parameters, gradients, strict=True):
                        parameter.grad = gradient
                else:
                    torch._foreach_add_([p.grad for p in parameters], gradients)
                total, targets, seen = total + loss, targets + num_targets, seen + num_tokens
            torch._foreach_mul_([p.grad for p in parameters], 1 / targets)
            scale = plan.scale(step)
            muon.step(plan.matrix_rate * scale, pool)
            adam.param_groups[0]["lr"] = plan.other_rate * scale
            adam.step()
            recent = total / targets if step == 1 else 0.97 * recent + 0.03 * total / targets
            if step % 50 == 0 or step == plan.steps:
                spent = time.monotonic() - started
                log(
                    f"{plan.name} step {step}/{plan.steps} loss {recent:.4f} tokens {seen / 1e6:.2f}M time {spent:.0f}s"
                )
            if step % every == 0 or step == plan.steps:
                spent = time.monotonic() - started
                state = {
                    "model": model.state_dict(),
                    "adam": adam.state_dict(),
                    "muon": muon.momenta,
                    "step": step,
                    "seen": seen,
                }
                torch.save(state | {"spent": spent, "recent": recent}, checkpoint)
                look(step)
