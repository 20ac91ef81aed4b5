"""What goes wrong between hosts is found, and ends the group on both: nodes and ranks are threads here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from asked_twice import outputs
from families.case import build
from families.registry import DIVIDED
from group_in_threads import ranks_are_threads
from node_threads import following, over_nodes
from pagewood.engine.api import EngineConfig
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import RunnerLostError
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.runner.ranks.hosts import node
from pagewood.engine.runner.ranks.hosts.hosts import Hosts
from pagewood.engine.runner.ranks.hosts.node import NodeGroup
from seeded_faults import Edit, seed_fault

_SKIP = """seen.append(rank)
    if len(seen) == 12:
        return
    link = self._links.get(rank)"""
_TWICE = """link.send(message)
        seen.append(rank)
        if len(seen) == 9:
            link.send(message)"""
_OLD = "generation=self._meeting.generation - 1, rank=None"
FAULTS: dict[str, tuple[Edit, str]] = {
    "a batch is skipped": (
        (NodeGroup, "_pass_on", "link = self._links.get(rank)", _SKIP),
        r"rank 1 cannot follow rank 0: ValueError\('step must be \d+, got \d+'\)",
    ),
    "a batch comes twice": (
        (NodeGroup, "_pass_on", "link.send(message)", _TWICE),
        r"rank 1 cannot follow rank 0: ValueError\('step must be \d+, got \d+'\)",
    ),
    "a batch is one of an old generation": (
        (Hosts, "tell_all", "generation=self._meeting.generation, rank=None", _OLD),
        r"node 1 cannot follow node 0: generation must be \d+, got \d+",
    ),
}


def compute(config: EngineConfig) -> None:
    """Let an engine answer."""
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    engine = build_engine(config, inbox=inbox, outbox=outbox)
    try:
        outputs(engine, inbox, outbox)
    finally:
        engine.close()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_between_hosts_ends_the_group(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(DIVIDED["olmo2"], tmp_path)
    ranks_are_threads(monkeypatch)
    config = EngineConfig(
        model=str(tmp_path), num_threads=2, tensor_parallel_size=2, max_running=4, page_size=4, max_total_tokens=1024
    )
    config = replace(over_nodes(2, config), num_threads=1)
    edit, message = FAULTS[name]
    monkeypatch.setattr(node, "seen", [], raising=False)  # for the code of the faults
    seed_fault([edit], monkeypatch)
    with following(config), pytest.raises(RunnerLostError, match=message):
        compute(config)
