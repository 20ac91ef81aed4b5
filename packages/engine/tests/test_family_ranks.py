"""Every family on two ranks of the CPU: its tokens are those of one process, in chunks, batches and after hits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from families.case import build
from families.registry import DIVIDED
from group_in_threads import ranks_are_threads
from pagewood.engine.api import EngineConfig, SamplingParams, Submit
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import Pending
from pagewood.engine.links import MemoryInbox, MemoryOutbox

FEW = ("olmo2", "qwen3-moe")
PARAMETERS = [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in DIVIDED]
PROMPTS = [list(range(3, 27)), list(range(3, 19)), [7, 9, 11], list(range(50, 72))]


def outputs(config: EngineConfig) -> list[list[int]]:
    """Return the tokens of all prompts, computed twice; the second time they are cached."""
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    engine = build_engine(config, inbox=inbox, outbox=outbox)
    found: dict[str, list[int]] = {}
    try:
        for turn in range(2):
            for index, prompt in enumerate(PROMPTS):
                sampling = SamplingParams(max_tokens=8, temperature=float(index % 2), seed=index, ignore_eos=True)
                tokens = np.array(prompt, "<i4").tobytes()
                inbox.put(Submit(request_id=f"{turn}.{index}", tokens=tokens, sampling=sampling))
            pending: Pending | None = None
            num_open = len(PROMPTS)
            while num_open or pending is not None:
                pending = engine.advance(pending)
                for delta in outbox.take():
                    assert delta.refusal is None, delta.refusal
                    found.setdefault(delta.request_id, []).extend(delta.tokens)
                    num_open -= delta.finish is not None
    finally:
        engine.close()
    return [found[name] for name in sorted(found)]


@pytest.mark.parametrize("name", PARAMETERS)
def test_tokens_are_those_of_one_process(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(DIVIDED[name], tmp_path)
    ranks_are_threads(monkeypatch)
    found: list[list[list[int]]] = []
    for count in (1, 2):
        config = EngineConfig(
            model=str(tmp_path), num_threads=2, tensor_parallel_size=count, max_running=4, chunked_prefill_size=16,
            page_size=4, max_total_tokens=1024,
        )  # fmt: skip
        found.append(outputs(config))
    assert found[1] == found[0]
