"""What an engine answers to some prompts, and to the same prompts again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagewood.engine.api import SamplingParams, Submit
from pagewood.engine.core.loop import Engine, Pending
from pagewood.engine.links import MemoryInbox, MemoryOutbox

PROMPTS = [list(range(3, 27)), list(range(3, 19)), [7, 9, 11], list(range(50, 72))]


def outputs(
    engine: Engine, inbox: MemoryInbox, outbox: MemoryOutbox, *, prompts: Sequence[Sequence[int]] = PROMPTS
) -> list[list[int]]:
    """Return the tokens of all prompts, computed twice; the second time they are cached. Every other one is sampled."""
    found: dict[str, list[int]] = {}
    try:
        for turn in range(2):
            for index, prompt in enumerate(prompts):
                sampling = SamplingParams(max_tokens=8, temperature=float(index % 2), seed=index, ignore_eos=True)
                tokens = np.array(prompt, "<i4").tobytes()
                inbox.put(Submit(request_id=f"{turn}.{index}", tokens=tokens, sampling=sampling))
            pending: Pending | None = None
            num_open = len(prompts)
            while num_open or pending is not None:
                pending = engine.advance(pending)
                for delta in outbox.take():
                    assert delta.refusal is None, delta.refusal
                    found.setdefault(delta.request_id, []).extend(delta.tokens)
                    num_open -= delta.finish is not None
    finally:
        engine.close()
    return [found[name] for name in sorted(found)]
