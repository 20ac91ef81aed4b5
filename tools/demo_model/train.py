"""Trains the engine's embedded chat model, its tokenizer and its drafters; the result is reproducible."""

import argparse
import random
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from batches import Encoder
from dialog import memory_dialog, turns
from eagle import Head, unrolled
from export import load_head, load_model, save_head, save_model
from fit import Loss, Plan, fit, log, scores
from model import Llama, Shape
from tasks import GENERATORS, draw
from tokenizer import save_tokenizer, train_tokenizer
from tokenizers import Tokenizer
from tool_dialog import tool_dialog
from tool_tasks import TOOLS
from torch import Tensor, nn

VOCAB = 512
MODEL = Shape(vocab=VOCAB, hidden=192, layers=4, heads=4, kv_heads=2, head_dim=64, intermediate=576)
DRAFT = Shape(vocab=VOCAB, hidden=96, layers=2, heads=4, kv_heads=2, head_dim=32, intermediate=256)
MODEL_PLAN = Plan(name="model", chunks=4, hold=1000, steps=8500, later=1500, long=1500)
TOOL_PLAN = Plan(
    name="tools", chunks=4, hold=600, steps=2000, later=0, long=0, tools=0.5, matrix_rate=0.007, other_rate=0.0018
)
LAST_PLAN = Plan(
    name="tools-last", chunks=4, hold=100, steps=1800, later=0, long=0, tools=0.4, matrix_rate=0.005, other_rate=0.0013
)
HONEST_PLAN = Plan(
    name="honest", chunks=4, hold=100, steps=700, later=0, long=0, tools=0.4, matrix_rate=0.005, other_rate=0.0013
)
DRAFT_PLAN = Plan(name="draft", chunks=4, hold=500, steps=1200, later=100, long=500)
DRAFT_TOOL_PLAN = Plan(
    name="draft-tools", chunks=4, hold=150, steps=500, later=0, long=0, tools=0.4, matrix_rate=0.008, other_rate=0.002
)
DRAFT_LAST_PLAN = Plan(
    name="draft-last", chunks=4, hold=1000, steps=4000, later=0, long=0, tools=0.4, matrix_rate=0.01, other_rate=0.0025
)
DRAFT_HONEST_PLAN = Plan(
    name="draft-honest", chunks=4, hold=100, steps=500, later=0, long=0, tools=0.4, matrix_rate=0.007, other_rate=0.0018
)
HEAD = Shape(vocab=VOCAB, hidden=192, layers=1, heads=2, kv_heads=1, head_dim=64, intermediate=192)
HEAD_PLAN = Plan(name="eagle", chunks=2, hold=500, steps=1000, later=100, long=500)
HEAD_TOOL_PLAN = Plan(
    name="eagle-tools", chunks=2, hold=200, steps=600, later=0, long=0, tools=0.4, matrix_rate=0.008, other_rate=0.002
)
HEAD_HONEST_PLAN = Plan(
    name="eagle-honest", chunks=2, hold=100, steps=500, later=0, long=0, tools=0.4, matrix_rate=0.007, other_rate=0.0018
)
CAPTURED = (0, 1, 2)
"""Layers of the model whose outputs the head reads."""
DEPTH = 6
"""Steps of the head that are trained together, on its own outputs."""
STEP_FACTOR = 0.8
"""Weight of the loss of each step of the head, relative to the step before."""
PLANS = {
    "model": (MODEL_PLAN, TOOL_PLAN, LAST_PLAN, HONEST_PLAN),
    "draft": (DRAFT_PLAN, DRAFT_TOOL_PLAN, DRAFT_LAST_PLAN, DRAFT_HONEST_PLAN),
    "eagle": (HEAD_PLAN, HEAD_TOOL_PLAN, HEAD_HONEST_PLAN),
}
"""The stages of each part; tools are offered after the first."""
LOOK = 40
"""Held-out prompts per task for the evaluation during training."""


def corpus(num_conversations: int) -> list[str]:
    rng = random.Random("tokenizer")
    dialogs = [turn for _ in range(num_conversations) for turn in islice(turns(rng), 10)]
    return [text for turn in dialogs for text in (turn.prompt, turn.answer)]


@torch.no_grad()
def progress(model: Llama, encoder: Encoder) -> str:
    """Return per task how many of `LOOK` held-out answers the model predicts, in one pass over the right answers."""
    rng = random.Random("progress")
    cases = {name: [[draw(rng, name, held=True)] for _ in range(LOOK)] for name in sorted(GENERATORS)}
    cases["memory"] = [memory_dialog(rng, distance=rng.randint(0, 4)) for _ in range(LOOK)]
    systems: dict[str, list[str | None]] = {name: [None] * LOOK for name in cases}
    for kind in TOOLS:
        offers, exchanges = zip(*(tool_dialog(rng, kind) for _ in range(LOOK)), strict=True)
        turns_of = [exchange.turns() for exchange in exchanges]
        for name, dialogs in (("call", [[call] for call, _ in turns_of]), ("answer", [[*both] for both in turns_of])):
            cases[f"{kind} {name}"] = dialogs
            systems[f"{kind} {name}"] = [offered.text() for offered in offers]
    shown: list[str] = []
    for name, dialogs in cases.items():
        rows: list[list[int]] = []
        starts: list[int] = []
        for system, dialog in zip(systems[name], dialogs, strict=True):
            parts = [encoder.turn_parts(turn.prompt, turn.answer) for turn in dialog]
            tokens = [] if system is None else encoder.system_part(system)
            tokens += [token for asked, answered in parts for token in asked + answered]
            starts.append(len(tokens) - len(parts[-1][1]))
            rows.append(tokens)
        longest = max(map(len, rows))
        tokens = torch.tensor([tokens + [encoder.pad] * (longest - len(tokens)) for tokens in rows])
        best = model.logits(model(tokens)).argmax(-1)
        right = sum(
            best[i, start - 1 : len(rows[i]) - 1].tolist() == rows[i][start:] for i, start in enumerate(starts)
        )  # fmt: skip
        shown.append(f"{name} {right}")
    return ", ".join(shown)


def predict(model: Llama) -> Loss:
    """Return the cross-entropy of the right answers, summed over tokens."""

    def loss(tokens: Tensor, at: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(scores(model, tokens, at), targets, reduction="sum")

    return loss


def imitate(draft: Llama, target: Llama) -> Loss:
    """Return the divergence from the target's distribution, summed over tokens."""

    def loss(tokens: Tensor, at: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = F.log_softmax(scores(target, tokens, at), -1)
        return F.kl_div(F.log_softmax(scores(draft, tokens, at), -1), wanted, reduction="sum", log_target=True)

    return loss


def imitate_ahead(head: Head, target: Llama) -> Loss:
    """Return the divergence of all steps of the head from the target's distribution, summed over tokens.

    A step counts while the tokens of its chain are the target's own greedy answer, and an answer's token follows.
    """

    def loss(tokens: Tensor, at: Tensor, targets: Tensor) -> Tensor:
        rows, length = tokens.shape
        is_answer = torch.zeros(rows * length, dtype=torch.bool)
        is_answer[at + 1] = True
        is_answer = is_answer.view(rows, length)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            with torch.no_grad():
                streams = target.streams(tokens)
                wanted = F.log_softmax(target.logits(target.norm(streams[-1])).float(), -1)
            chosen = F.pad(wanted.argmax(-1), (1, -1), value=-1)
            is_own = F.pad(greedy(is_answer, tokens == chosen), (0, DEPTH + 1))
            is_answer, wanted = F.pad(is_answer, (0, DEPTH + 1)), F.pad(wanted, (0, 0, 0, DEPTH))
            counts, total = torch.ones(rows, length, dtype=torch.bool), torch.zeros(())
            for step, output in enumerate(unrolled(head, target, tokens, streams, DEPTH)):
                first, last = step + 1, step + 1 + length
                counts = counts & is_own[:, first:last]
                here = counts & is_answer[:, first + 1 : last + 1]
                logits = target.logits(head.norm(output[here])).float()
                wanted_ND = wanted[:, first:last][here]
                divergence = F.kl_div(F.log_softmax(logits, -1), wanted_ND, reduction="sum", log_target=True)
                total = total + STEP_FACTOR**step * divergence
        return total

    return loss


def greedy(is_answer_BT: Tensor, is_chosen_BT: Tensor) -> Tensor:
    """Return which tokens of answers are the target's choice, as are all earlier tokens of the same answer."""
    departs = is_answer_BT & ~is_chosen_BT
    departures = departs.cumsum(1)
    begins = is_answer_BT & ~F.pad(is_answer_BT, (1, -1))
    before = torch.where(begins, departures - departs.long(), 0).cummax(1).values
    return is_answer_BT & (departures == before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("build/demo_model"),
        help="folder of checkpoints; a stopped run continues from it",
    )
    parser.add_argument(
        "--only", choices=tuple(PLANS), help="train one part; the draft and the head need the model in --out"
    )
    parser.add_argument(
        "--from",
        type=Path,
        dest="start",
        help="folder of trained parts; they keep the tokenizer and go through the stages after the first",
    )
    parser.add_argument("--last", type=int, default=0, help="with --from: only that many stages, the last ones")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.setswitchinterval(0.0005)
    options.out.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    parts = tuple(PLANS) if options.only is None else (options.only,)
    start: Path | None = options.start

    if start is None:
        tokenizer = train_tokenizer(corpus(4000), VOCAB)
    else:
        tokenizer = Tokenizer.from_file(str(start / "tokenizer.json"))
    encoder = Encoder(tokenizer)

    def train(part: str, network: nn.Module, loss: Loss, look: Callable[[int], None]) -> None:
        network.requires_grad_(True)
        plans = PLANS[part][0 if start is None else 1 :]
        for plan in plans[-options.last :]:
            log(f"{plan.name}: {sum(p.numel() for p in network.parameters()):,} parameters")
            checkpoint = options.work / f"{plan.name}.pt"
            fit(network, encoder, loss, plan, workers=options.workers, checkpoint=checkpoint, every=500, look=look)

    if "model" in parts:
        torch.manual_seed(1)
        model = Llama(MODEL) if start is None else load_model(start)
        save_tokenizer(tokenizer, options.out)

        def look(step: int) -> None:
            save_model(model, tokenizer, options.out)
            log(f"right answers of {LOOK} at step {step}: {progress(model, encoder)}")

        train("model", model, predict(model), look)
    target = load_model(options.out)
    if "draft" in parts:
        torch.manual_seed(2)
        draft = Llama(DRAFT) if start is None else load_model(start / "draft")
        train("draft", draft, imitate(draft, target), lambda _: save_model(draft, tokenizer, options.out / "draft"))
    if "eagle" in parts:
        torch.manual_seed(3)
        if start is None:
            head = Head(HEAD, CAPTURED)
            head.start_from(target)
        else:
            head = load_head(start / "eagle")
        train("eagle", head, imitate_ahead(head, target), lambda _: save_head(head, options.out / "eagle"))


if __name__ == "__main__":
    main()
