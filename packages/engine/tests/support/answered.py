"""What an engine answers to requests that arrive together, stepped by the test until all have ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pagewood.engine.api import Command, Delta, SamplingParams, Submit
from pagewood.engine.core.loop import Engine, Pending
from pagewood.engine.links import MemoryInbox, MemoryOutbox


def request(name: object, prompt: Sequence[int] | np.ndarray, *, fields: Any = None, **sampling: Any) -> Submit:
    """Return a request, greedy and without an end token unless `sampling` says otherwise; `fields` are those of it."""
    own: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, **sampling}
    of_it: dict[str, Any] = fields or {}
    tokens = np.asarray(prompt, "<i4").tobytes()
    return Submit(request_id=str(name), tokens=tokens, sampling=SamplingParams(**own), **of_it)


def answers_to(
    engine: Engine, inbox: MemoryInbox, outbox: MemoryOutbox, commands: Iterable[Command]
) -> list[list[Delta]]:
    """Return the answers to each command, when all have ended and nothing is in flight; check the accounting."""
    found: dict[str, list[Delta]] = {}
    for one in commands:
        found[one.request_id] = []
        inbox.put(one)
    pending: Pending | None = None
    while pending is not None or not all(deltas and deltas[-1].finish for deltas in found.values()):
        pending = engine.advance(pending)
        for delta in outbox.take():
            found[delta.request_id].append(delta)
    assert engine.violation() is None
    return list(found.values())


def tokens_of(deltas: Iterable[Delta]) -> list[int]:
    """Return the tokens of an answer."""
    return [token for delta in deltas for token in delta.tokens]
