"""Conversations: turns of all tasks, questions about earlier turns, and sometimes a system message."""

import random
from collections.abc import Iterator

import fact_tasks
import language_tasks
import number_tasks
import talk_tasks
import text_tasks
from memory_tasks import Memory
from tasks import GENERATORS, Turn, draw, held_out
from text_tasks import sentence

REGISTERED = (fact_tasks, language_tasks, number_tasks, talk_tasks, text_tasks)
"""The modules that add tasks to `GENERATORS` when they are imported."""

SYSTEM = (
    "You are a helpful assistant.", "You are a helpful assistant", "You are a helpful, honest and concise assistant.",
    "You are a friendly chatbot.", "Be brief.", "Answer the user's questions.", "You are an AI assistant.",
    "You are a small demo model.", "Answer in one sentence.", "You are Pagewood, a helpful assistant.",
    "You are a helpful AI assistant. Answer concisely.", "Be helpful and polite.",
)  # fmt: skip
MEMORY_SHARE = 0.06

NAMES_OF_TASKS = tuple(sorted(GENERATORS))
SHARES = tuple(GENERATORS[name][0] for name in NAMES_OF_TASKS)

SLOW_TO_LEARN = {
    "add": 2.2, "subtract": 2.0, "multiply": 1.5, "divide": 1.3, "sort numbers": 2.0, "sort words": 1.6,
    "repeat n times": 1.8, "count words": 1.8, "upper-case": 1.3,
}  # fmt: skip
"""Factors by which the shares of these tasks grow later in training, when the easy tasks are learnt."""
LATER_SHARES = tuple(GENERATORS[name][0] * SLOW_TO_LEARN.get(name, 1.0) for name in NAMES_OF_TASKS)


def system_message(rng: random.Random) -> str | None:
    """Return a system message, or None for most conversations."""
    kind = rng.random()
    if kind < 0.65:
        return None
    return rng.choice(SYSTEM) if kind < 0.92 else sentence(rng)


def turns(rng: random.Random, *, later: bool = False) -> Iterator[Turn]:
    """Yield an endless conversation of training turns, with questions about its earlier turns."""
    memory, shares = Memory(), LATER_SHARES if later else SHARES
    has_begun_with_fact = rng.random() < 0.5
    while True:
        if not has_begun_with_fact or rng.random() < MEMORY_SHARE:
            has_begun_with_fact = True
            yield from remembered(rng, memory)
        else:
            yield draw(rng, rng.choices(NAMES_OF_TASKS, shares)[0], held=False)


def remembered(rng: random.Random, memory: Memory) -> Iterator[Turn]:
    """Return a turn that states a fact or asks for one; a held-out value is replaced by another."""
    if rng.random() < (0.35 if memory.known else 0.75):
        before = dict(memory.known)
        while held_out((turn := memory.tell(rng)).content):
            memory.known = dict(before)
        yield turn
    else:
        yield memory.ask(rng)


def turns_of_any_task(rng: random.Random, count: int) -> list[Turn]:
    return [draw(rng, rng.choices(NAMES_OF_TASKS, SHARES)[0], held=False) for _ in range(count)]


def memory_dialog(rng: random.Random, *, distance: int) -> list[Turn]:
    """Return a conversation that states a held-out value and, after `distance` turns of other tasks, asks for it."""
    memory = Memory()
    while not held_out((first := memory.tell(rng)).content):
        memory = Memory()
    between = turns_of_any_task(rng, distance)
    while (last := memory.ask(rng)).content != first.content:
        pass
    return [first, *between, last]
