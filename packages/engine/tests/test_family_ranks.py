"""Every family on two ranks of the CPU: its tokens are those of one process, in chunks, batches and after hits."""

from __future__ import annotations

from pathlib import Path

import pytest

from asked_twice import outputs
from families.case import build
from families.registry import DIVIDED
from group_in_threads import ranks_are_threads
from pagewood.engine.api import EngineConfig
from pagewood.engine.build import build_engine
from pagewood.engine.links import MemoryInbox, MemoryOutbox

FEW = ("olmo2", "qwen3-moe")
PARAMETERS = [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in DIVIDED]


def answered(config: EngineConfig) -> list[list[int]]:
    """Return what an engine answers."""
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    return outputs(build_engine(config, inbox=inbox, outbox=outbox), inbox, outbox)


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
        found.append(answered(config))
    assert found[1] == found[0]
