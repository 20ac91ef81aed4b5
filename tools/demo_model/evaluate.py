"""Counts exact answers on held-out prompts by task, and how many drafts are accepted, for a folder of `train.py`."""

import argparse
import random
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from dialog import SYSTEM, memory_dialog, turns_of_any_task
from drafting import Drafter, draft_model_chains, head_chains, num_steps
from export import load_head, load_model
from tasks import GENERATORS, Turn, draw
from tool_dialog import Offer, exchange, offer, tool_dialog, unserved
from tool_format import Message, Tool
from tool_tasks import TOOLS, Exchange
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

ALL = "all tasks, after 10 turns"
NO_TOOL = "no tool fits, or none is offered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A conversation whose next answer the model must give."""

    row: str
    messages: list[Message]
    tools: list[Tool] = field(default_factory=list[Tool])
    answer: str


@dataclass(slots=True)
class Score:
    """Counts of one row of the table; `measure` writes them.

    The first token of an answer is not drafted: it comes from the step that computes the prompt.
    """

    cases: int = 0
    right: int = 0
    tokens: int = 0
    steps: Counter[str] = field(default_factory=Counter[str])

    def accepted_length(self, drafter: str) -> float:
        """Return the tokens per verification, with the one that each verification adds to the drafts."""
        return self.tokens / max(1, self.steps[drafter])


def asked(system: str | None, dialog: list[Turn]) -> list[Message]:
    """Return the messages of a conversation up to its last prompt."""
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    for turn in dialog[:-1]:
        messages += [{"role": "user", "content": turn.prompt}, {"role": "assistant", "content": turn.answer}]
    return [*messages, {"role": "user", "content": dialog[-1].prompt}]


def cases(count: int) -> Iterable[Case]:
    """Return `count` different prompts per task, a quarter with a system message, and then conversations."""

    def case(row: str, system: str | None, dialog: list[Turn]) -> Case:
        return Case(row=row, messages=asked(system, dialog), answer=dialog[-1].answer)

    for name in GENERATORS:
        rng = random.Random(f"evaluate {name}")
        found: dict[str, Turn] = {}
        for _ in range(20 * count):
            turn = draw(rng, name, held=True)
            found.setdefault(turn.prompt, turn)
            if len(found) == count:
                break
        for at, turn in enumerate(found.values()):
            yield case(name, rng.choice(SYSTEM) if at % 4 == 0 else None, [turn])
    rng = random.Random("evaluate conversations")
    for at in range(count):
        yield case("memory, 0 to 9 turns later", None, memory_dialog(rng, distance=at % 10))
    for at in range(count):
        before = turns_of_any_task(rng, 10)
        last = draw(rng, tuple(GENERATORS)[at % len(GENERATORS)], held=True)
        yield case(ALL, SYSTEM[0] if at % 2 else None, [*before, last])


def tool_cases(count: int) -> Iterable[Case]:
    """Return `count` calls and `count` answers from results per kind of tool, and requests that no tool serves."""
    for kind in TOOLS:
        rng = random.Random(f"evaluate tool {kind}")
        for _ in range(count):
            offered, last = tool_dialog(rng, kind)
            yield from both_cases(offered, [], last)
    rng = random.Random("evaluate other requests")
    for at in range(count):
        offered = offer(rng)
        turn = unserved(rng, offered, held=True) if at % 2 else None
        while turn is None or offered.serves(turn):
            turn = draw(rng, rng.choice(tuple(GENERATORS)), held=True)
        yield Case(row=NO_TOOL, messages=asked(offered.system, [turn]), tools=offered.tools, answer=turn.answer)
    rng = random.Random("evaluate later calls")
    for _ in range(count):
        offered, last = tool_dialog(rng, rng.choice(tuple(TOOLS)))
        before: list[Message] = []
        for _ in range(3):
            earlier = exchange(rng, offered)
            before += [*earlier.messages(), {"role": "assistant", "content": earlier.answer}]
        yield from both_cases(offered, before, last, later=True)


def both_cases(offered: Offer, before: list[Message], last: Exchange, *, later: bool = False) -> Iterable[Case]:
    """Return the case that calls, and the case that answers from the results."""
    system: list[Message] = [] if offered.system is None else [{"role": "system", "content": offered.system}]
    messages = [*system, *before, *last.messages()]
    at = len(system) + len(before) + 1
    for turn, known in zip(last.turns(), (messages[:at], messages), strict=True):
        row = f"after 3 requests, {turn.task.rpartition(', ')[2]}" if later else turn.task
        yield Case(row=row, messages=known, tools=offered.tools, answer=turn.answer)


@torch.no_grad()
def answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    *,
    rows: int = 50,
) -> list[list[int]]:
    """Return greedy answers as token ids with their end token, in the order of the prompts."""
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


def drafters(folder: Path) -> dict[str, Drafter]:
    """Return the drafters of the folder by name."""
    found: dict[str, Drafter] = {}
    if (folder / "draft").exists():
        found["draft model"] = partial(draft_model_chains, load_model(folder / "draft"))
    if (folder / "eagle").exists():
        found["head"] = partial(head_chains, load_head(folder / "eagle"), load_model(folder))
    return found


def count_steps(
    drafter: Drafter, prompts: list[list[int]], made: list[list[int]], depth: int, *, rows: int = 20
) -> list[int]:
    """Return how many verifications each answer takes with chains of `depth` drafts."""
    counts = [0] * len(prompts)
    texts = [prompt + answer for prompt, answer in zip(prompts, made, strict=True)]
    order = sorted(range(len(texts)), key=lambda at: len(texts[at]))
    for start in range(0, len(order), rows):
        chosen = order[start : start + rows]
        longest = len(texts[chosen[-1]])
        tokens_BT = torch.tensor([texts[at] + [0] * (longest - len(texts[at])) for at in chosen])
        for at, chains in zip(chosen, drafter(tokens_BT, depth).tolist(), strict=True):
            counts[at] = num_steps(texts[at], len(prompts[at]), chains)
    return counts


def measure(folder: Path, asked: list[Case], depth: int, *, misses: list[str]) -> dict[str, Score]:
    """Return the rows of the table; a description of each wrong answer is added to `misses`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [
        tokenizer.apply_chat_template(
            case.messages,
            tools=[tool.declaration() for tool in case.tools] or None,
            add_generation_prompt=True,
            return_dict=False,
        )
        for case in asked
    ]
    made = answers(model, tokenizer, prompts)
    table: dict[str, Score] = {}
    for case, ids in zip(asked, made, strict=True):
        score = table.setdefault(case.row, Score())
        text, wanted = tokenizer.decode(ids, skip_special_tokens=True), case.answer
        score.cases += 1
        score.right += text == wanted and ids[-1] == tokenizer.eos_token_id
        if text != wanted:
            misses.append(f"{case.row}: {case.messages[-1]['content']!r} gave {text!r}, not {wanted!r}")
        score.tokens += len(ids) - 1
    for name, drafter in drafters(folder).items():
        for case, steps in zip(asked, count_steps(drafter, prompts, made, depth), strict=True):
            table[case.row].steps[name] += steps
    return table


def markdown(table: dict[str, Score]) -> str:
    """Return a table of RESULTS.md, with a last row for all tasks."""
    total = Score(
        cases=sum(row.cases for row in table.values()),
        right=sum(row.right for row in table.values()),
        tokens=sum(row.tokens for row in table.values()),
        steps=sum((row.steps for row in table.values()), Counter[str]()),
    )
    lines = [
        " | ".join(["| task", "held-out prompts", "exact answers", *total.steps]) + " |",
        "|---" + "|---:" * (2 + len(total.steps)) + "|",
    ]
    for name, row in {**table, "**all**": total}.items():
        lengths = [f"{row.accepted_length(drafter):.2f}" for drafter in total.steps]
        lines.append(" | ".join([f"| {name}", f"{row.cases}", f"{row.right / row.cases:.1%}", *lengths]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=200, help="prompts per task")
    parser.add_argument("--draft-tokens", type=int, default=5, help="tokens per chain of drafts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--misses", action="store_true", help="print each wrong answer")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore")
    logging.disable_progress_bar()
    misses: list[str] = []
    for asked in (cases(options.count), tool_cases(options.count)):
        print(markdown(measure(options.folder, list(asked), options.draft_tokens, misses=misses)), end="\n\n")
    if options.misses:
        print("\n".join(misses))


if __name__ == "__main__":
    main()
