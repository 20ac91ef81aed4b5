"""The registry of task generators, variations of prompts, and the held-out split."""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

HELD_OUT_OF_1000 = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A prompt with its only right answer; equal `content` is always on the same side of the held-out split."""

    task: str
    content: str
    prompt: str
    answer: str


Generator = Callable[[random.Random], Turn]

GENERATORS: dict[str, tuple[float, Generator]] = {}
"""Stateless tasks by name, with their shares of the training turns."""


def task(name: str, *, share: float) -> Callable[[Generator], Generator]:
    """Register a generator under `name`."""

    def register(generator: Generator) -> Generator:
        GENERATORS[name] = (share, generator)
        return generator

    return register


def held_out(content: str) -> bool:
    """Return whether prompts with this content are held out from training."""
    digest = hashlib.blake2b(content.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 1000 < HELD_OUT_OF_1000


def draw(rng: random.Random, name: str, *, held: bool) -> Turn:
    """Return a turn of the task on the given side of the split."""
    generator = GENERATORS[name][1]
    while True:
        turn = generator(rng)
        if held_out(turn.content) == held:
            return turn


GREETINGS = ("Hi", "Hello", "Hey", "Good morning", "Hi there", "Hello there")
STARTS_WITH_NAME = ("I ", "I'", "Monday", "January")


def lower_first(text: str) -> str:
    """Lower the first letter, except in words that are always capitalized."""
    return text if text.startswith(STARTS_WITH_NAME) else text[:1].lower() + text[1:]


def phrase(rng: random.Random, templates: tuple[str, ...], *, polite: bool = True, **content: object) -> str:
    """Choose a template, vary its spelling as people do, and fill in the content unchanged.

    A template that asks for something politely possible ("Reverse {w}") also appears with "please" and "can you".
    """
    text = rng.choice(templates)
    if polite and text[-1] != "?" and text[0].isupper() and rng.random() < 0.16:
        start = rng.choice(("Please {}", "Can you {}", "Could you {}", "please {}", "Can you please {}", "Now {}"))
        text = start.replace("{}", lower_first(text))
    elif polite and text[-1] in "?." and rng.random() < 0.06:
        text = text[:-1] + rng.choice((" please", ", please", " please?"))
    if not text.startswith(GREETINGS) and rng.random() < 0.08:
        greeting = rng.choice(GREETINGS)
        text = f"{greeting}{rng.choice((', ', '! ', ' ', '. '))}{rng.choice((text, lower_first(text)))}"
    if rng.random() < 0.25:
        text = lower_first(text)
    if text[-1] in "?." and len(text) > 3 and rng.random() < 0.3:
        text = text[:-1]
    elif text[-1].isalpha() and rng.random() < 0.15:
        text += "."
    return text.format(**content)
