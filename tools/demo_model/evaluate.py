"""Counts exact answers on held-out prompts by task, and how often the draft agrees, for a folder of `train.py`."""

import argparse
import random
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from dialog import SYSTEM, memory_dialog, turns_of_any_task
from tasks import GENERATORS, Turn, draw
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

ALL = "all tasks, after 10 turns"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A conversation whose last answer the model must give."""

    row: str
    system: str | None
    dialog: list[Turn]

    def messages(self) -> list[dict[str, str]]:
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.dialog[:-1]:
            messages += [{"role": "user", "content": turn.prompt}, {"role": "assistant", "content": turn.answer}]
        return [*messages, {"role": "user", "content": self.dialog[-1].prompt}]


@dataclass(slots=True)
class Score:
    """Counts of one row of the table; `measure` writes them."""

    cases: int = 0
    right: int = 0
    tokens: int = 0
    agreed: int = 0


def cases(count: int) -> Iterable[Case]:
    """Return `count` different prompts per task, a quarter with a system message, and then conversations."""
    for name in GENERATORS:
        rng = random.Random(f"evaluate {name}")
        found: dict[str, Turn] = {}
        for _ in range(20 * count):
            turn = draw(rng, name, held=True)
            found.setdefault(turn.prompt, turn)
            if len(found) == count:
                break
        for at, turn in enumerate(found.values()):
            yield Case(row=name, system=rng.choice(SYSTEM) if at % 4 == 0 else None, dialog=[turn])
    rng = random.Random("evaluate conversations")
    for at in range(count):
        yield Case(row="memory, 0 to 9 turns later", system=None, dialog=memory_dialog(rng, distance=at % 10))
    for at in range(count):
        before = turns_of_any_task(rng, 10)
        last = draw(rng, tuple(GENERATORS)[at % len(GENERATORS)], held=True)
        yield Case(row=ALL, system=SYSTEM[0] if at % 2 else None, dialog=[*before, last])


@torch.no_grad()
def answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: list[list[dict[str, str]]],
    *,
    rows: int = 50,
) -> list[list[int]]:
    """Return greedy answers as token ids with their end token, in the order of the conversations."""
    prompts = [
        tokenizer.apply_chat_template(each, add_generation_prompt=True, return_dict=False) for each in conversations
    ]
    order = sorted(range(len(prompts)), key=lambda at: len(prompts[at]))
    found: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(order), rows):
        chosen = order[start : start + rows]
        padded = tokenizer.pad({"input_ids": [prompts[at] for at in chosen]}, padding_side="left", return_tensors="pt")
        made = model.generate(**padded, max_new_tokens=250, do_sample=False)[:, padded["input_ids"].shape[1] :]
        for at, ids in zip(chosen, made.tolist(), strict=True):
            end = ids.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in ids else len(ids)
            found[at] = ids[:end]
    return found


@torch.no_grad()
def agreed(draft: PreTrainedModel, prompt: list[int], answer: list[int]) -> int:
    """Return how many tokens of the answer the draft predicts, each from the true tokens before it."""
    logits = draft(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return int((logits.argmax(-1) == torch.tensor(answer)).sum())


def measure(folder: Path, count: int, *, misses: list[str]) -> dict[str, Score]:
    """Return the rows of the table; a description of each wrong answer is added to `misses`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    draft_folder = folder / "draft"
    draft = (
        AutoModelForCausalLM.from_pretrained(draft_folder, dtype=torch.float32).eval()
        if draft_folder.exists()
        else None
    )
    asked = list(cases(count))
    made = answers(model, tokenizer, [case.messages() for case in asked])
    table: dict[str, Score] = {}
    for case, ids in zip(asked, made, strict=True):
        score = table.setdefault(case.row, Score())
        text, wanted = tokenizer.decode(ids, skip_special_tokens=True), case.dialog[-1].answer
        score.cases += 1
        score.right += text == wanted and ids[-1] == tokenizer.eos_token_id
        if text != wanted:
            misses.append(f"{case.row}: {case.dialog[-1].prompt!r} gave {text!r}, not {wanted!r}")
        score.tokens += len(ids)
        if draft is not None:
            prompt = tokenizer.apply_chat_template(case.messages(), add_generation_prompt=True, return_dict=False)
            score.agreed += agreed(draft, prompt, ids)
    return table


def markdown(table: dict[str, Score]) -> str:
    """Return the table of the README, with a last row for all tasks."""
    total = Score(
        cases=sum(row.cases for row in table.values()),
        right=sum(row.right for row in table.values()),
        tokens=sum(row.tokens for row in table.values()),
        agreed=sum(row.agreed for row in table.values()),
    )
    lines = ["| task | held-out prompts | exact answers | draft agrees |", "|---|---:|---:|---:|"]
    for name, row in {**table, "**all**": total}.items():
        lines.append(f"| {name} | {row.cases} | {row.right / row.cases:.1%} | {row.agreed / row.tokens:.0%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=200, help="prompts per task")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--misses", action="store_true", help="print each wrong answer")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore")
    logging.disable_progress_bar()
    misses: list[str] = []
    print(markdown(measure(options.folder, options.count, misses=misses)))
    if options.misses:
        print("\n".join(misses))


if __name__ == "__main__":
    main()
