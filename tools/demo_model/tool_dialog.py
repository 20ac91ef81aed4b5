"""Conversations in which the user offers tools: requests that a tool serves, and requests that no tool serves."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from dialog import system_message, turns
from talk_tasks import UNABLE
from tasks import Turn
from tool_format import Tool, system_text
from tool_tasks import OTHER_TOOLS, TOOLS, Exchange

ARITHMETIC = ("add", "subtract", "multiply", "divide", "too hard")
COUNTED = (0, 1, 1, 2, 2, 3, 3)
"""How many of the three kinds of tools a conversation offers."""


@dataclass(slots=True)
class Offer:
    """The system message and the tools of one conversation; it does not change after it is drawn."""

    system: str | None = None
    tools: list[Tool] = field(default_factory=list[Tool])
    kinds: dict[str, Tool] = field(default_factory=dict[str, Tool])

    def text(self) -> str | None:
        return system_text(self.system, self.tools)

    def serves(self, turn: Turn) -> bool:
        """Return whether an ordinary turn asks for something that an offered tool could do."""
        if "calculator" in self.kinds and turn.task in ARITHMETIC:
            return True
        if turn.task != "anything else":
            return False
        asks = {"calculator": r"\d", "weather": r"weather|rain", "calendar": r"\b(plan|book|schedule)\b"}
        return any(re.search(asks[kind], turn.prompt.lower()) for kind in self.kinds)


def offer(rng: random.Random, kinds: list[str] | None = None) -> Offer:
    """Draw a system message and tools: those of `kinds`, or of some."""
    kinds = rng.sample(list(TOOLS), rng.choice(COUNTED)) if kinds is None else kinds
    made = {kind: TOOLS[kind][0](rng) for kind in kinds}
    tools = [*made.values()]
    if tools and rng.random() < 0.2:
        tools.insert(rng.randint(0, len(tools)), rng.choice(OTHER_TOOLS))
    return Offer(system=system_message(rng), tools=tools, kinds=made)


def exchange(rng: random.Random, offered: Offer, *, held: bool = False, kind: str | None = None) -> Exchange:
    """Return a request that an offered tool serves."""
    kind = rng.choice(list(offered.kinds)) if kind is None else kind
    return rng.choice(TOOLS[kind][1])(rng, offered.kinds[kind], held=held)


def unserved(rng: random.Random, offered: Offer, *, held: bool = False) -> Turn | None:
    """Return a request for a tool that is not offered, or None if all of them are."""
    missing = [kind for kind in ("weather", "calendar") if kind not in offered.kinds]
    if not missing:
        return None
    make, serve = TOOLS[rng.choice(missing)]
    asked = rng.choice(serve)(rng, make(rng), held=held)
    return Turn(task="no tool", content=asked.content, prompt=asked.prompt, answer=UNABLE)


def ordinary(offered: Offer, source: Iterator[Turn]) -> Turn:
    """Return the next turn of `source` that no offered tool serves."""
    return next(turn for turn in source if not offered.serves(turn))


def tool_turns(rng: random.Random, offered: Offer) -> Iterator[tuple[Turn, ...]]:
    """Yield an endless conversation of training turns; the turns of a tuple belong together."""
    source = turns(rng, later=True)
    while True:
        kind = rng.random()
        if kind < 0.6 and offered.kinds:
            yield exchange(rng, offered).turns()
        elif kind > 0.88 and (turn := unserved(rng, offered)) is not None:
            yield (turn,)
        else:
            yield (ordinary(offered, source),)


def tool_dialog(rng: random.Random, kind: str) -> tuple[Offer, Exchange]:
    """Return a held-out request for a kind of tool, and an offer that has the tool."""
    kinds = [kind, *rng.sample([other for other in TOOLS if other != kind], rng.choice((0, 1, 2)))]
    offered = offer(rng, rng.sample(kinds, len(kinds)))
    return offered, exchange(rng, offered, held=True, kind=kind)
