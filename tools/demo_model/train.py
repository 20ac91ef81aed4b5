"""Trains the engine's embedded chat model, its draft and its tokenizer; the result is reproducible."""

import argparse
import random
import sys
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from batches import Encoder
from dialog import memory_dialog, turns
from export import save_model
from fit import Loss, Plan, fit, log, scores
from model import Llama, Shape
from tasks import GENERATORS, draw
from tokenizer import save_tokenizer, train_tokenizer
from torch import Tensor

VOCAB = 512
MODEL = Shape(vocab=VOCAB, hidden=192, layers=4, heads=4, kv_heads=2, head_dim=64, intermediate=576)
DRAFT = Shape(vocab=VOCAB, hidden=64, layers=3, heads=2, kv_heads=1, head_dim=32, intermediate=192)
MODEL_PLAN = Plan(name="model", chunks=4, hold=1000, steps=8500, later=1500, long=1500)
DRAFT_PLAN = Plan(name="draft", chunks=4, hold=200, steps=1000, later=100, long=300)
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
    shown: list[str] = []
    for name, dialogs in cases.items():
        rows: list[list[int]] = []
        starts: list[int] = []
        for dialog in dialogs:
            parts = [encoder.turn_parts(turn.prompt, turn.answer) for turn in dialog]
            tokens = [token for asked, answered in parts for token in asked + answered]
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


def imitate(teacher: Llama) -> Loss:
    """Return the distance to the teacher's distribution, summed over tokens."""

    def loss(logits: Tensor, tokens: Tensor, at: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = F.log_softmax(scores(teacher, tokens, at), -1)
        return F.kl_div(F.log_softmax(logits, -1), wanted, reduction="sum", log_target=True)

    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("build/demo_model"),
        help="folder of checkpoints; a stopped run continues from it",
    )
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.setswitchinterval(0.0005)
    options.out.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)

    tokenizer = train_tokenizer(corpus(4000), VOCAB)
    save_tokenizer(tokenizer, options.out)
    encoder = Encoder(tokenizer)

    torch.manual_seed(1)
    model = Llama(MODEL)
    log(f"model: {sum(p.numel() for p in model.parameters()):,} parameters")

    def look(step: int) -> None:
        save_model(model, tokenizer, options.out)
        log(f"right answers of {LOOK} at step {step}: {progress(model, encoder)}")

    def right(logits: Tensor, _tokens: Tensor, _at: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets, reduction="sum")

    fit(
        model,
        encoder,
        right,
        MODEL_PLAN,
        workers=options.workers,
        checkpoint=options.work / "model.pt",
        every=500,
        look=look,
    )

    torch.manual_seed(2)
    draft = Llama(DRAFT)
    log(f"draft: {sum(p.numel() for p in draft.parameters()):,} parameters")

    def keep(_step: int) -> None:
        save_model(draft, tokenizer, options.out / "draft")

    fit(
        draft,
        encoder,
        imitate(model),
        DRAFT_PLAN,
        workers=options.workers,
        checkpoint=options.work / "draft.pt",
        every=500,
        look=keep,
    )


if __name__ == "__main__":
    main()
