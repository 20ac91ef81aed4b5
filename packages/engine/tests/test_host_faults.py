"""What goes wrong between hosts is found, and ends the group on both: nodes and ranks are threads here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from asked_twice import answered, small
from backwards import seed_backwards
from families.case import build
from families.registry import DIVIDED
from group_in_threads import ranks_are_threads
from node_threads import THREE_PARTS, following, over_nodes
from pagewood.engine.api import EngineConfig
from pagewood.engine.core.loop import RunnerLostError
from pagewood.engine.runner.ranks import following as following_ranks
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


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_between_hosts_ends_the_group(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(DIVIDED["olmo2"], tmp_path)
    ranks_are_threads(monkeypatch)
    config = replace(over_nodes(2, small(tmp_path, tensor_parallel_size=2)), num_threads=1)
    edit, message = FAULTS[name]
    monkeypatch.setattr(node, "seen", [], raising=False)  # for the code of the faults
    seed_fault([edit], monkeypatch)
    with following(config), pytest.raises(RunnerLostError, match=message):
        answered(config)


_SKIPPED = """number += 1
                if number == 9 and rank == 1:
                    continue"""
_OLD_PAGES = """assert isinstance(batch, Batch)
                batch = replace(batch, page_ids=batch.page_ids * (rank != 1))"""
_OTHER_SEED = """assert isinstance(batch, Batch)
                batch.sampling.words[:, 0] += rank == 1"""
_IN_FOLLOW = following_ranks, "_follow", "assert isinstance(batch, Batch)"
OF_RANKS: dict[str, tuple[Edit, str, str]] = {
    "a batch is skipped": (
        (following_ranks, "_follow", "number += 1", _SKIPPED),
        # It has the sums of the step behind, or of none.
        "rank 1 (does not take part in a step|has other tokens or hidden states than rank 0 after step)",
        "rank 1 has computed another batch than rank 0 in step 9",
    ),
    "page tables are old": (
        (*_IN_FOLLOW, _OLD_PAGES),
        "rank 1 has other (tables of rows|tokens or hidden states) than rank 0 after step",
        "rank 1 has other (tables of rows|tokens or hidden states) than rank 0 after step",
    ),
    "tokens are drawn with another seed": (
        (*_IN_FOLLOW, _OTHER_SEED),
        "rank 1 has other tokens or hidden states than rank 0",
        "",
    ),
}
"""Fault of rank 1, and how it is found in ranks and in stages. A stage of one rank draws with its seed alone, so its
tokens are those of that seed."""  # fmt: skip


def over_hosts(folder: Path, num_nodes: int, per_node: int, num_stages: int) -> EngineConfig:
    """Return the configuration of node 0."""
    count = num_nodes * per_node
    ranks = {"tensor_parallel_size": count // num_stages, "pipeline_parallel_size": num_stages}
    config = small(folder, num_threads=count, **ranks)
    return replace(over_nodes(num_nodes, config), num_threads=per_node)


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("name", OF_RANKS)
def test_a_rank_on_another_host_that_differs_ends_the_group(
    name: str, num_stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit, of_ranks, of_stages = OF_RANKS[name]
    message = of_ranks if num_stages == 1 else of_stages
    if not message:
        pytest.skip("a stage of one rank has no rank to differ from")
    build(DIVIDED["olmo2"], tmp_path)
    ranks_are_threads(monkeypatch)
    monkeypatch.setattr(following_ranks, "replace", replace, raising=False)  # for the code of the faults
    seed_fault([edit], monkeypatch)
    config = over_hosts(tmp_path, 2, 1, num_stages)
    with following(config), pytest.raises(RunnerLostError, match=message):
        answered(config)


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_rank_that_adds_in_another_order_is_found_over_hosts(
    num_stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stages, that of three ranks on the second host; its hidden states, or those that it sends, differ."""
    build(THREE_PARTS, tmp_path)
    ranks_are_threads(monkeypatch)
    seed_backwards(2, monkeypatch)
    config = over_hosts(tmp_path, 3, 1, 1) if num_stages == 1 else over_hosts(tmp_path, 2, 3, 2)
    message = r"rank \d has other (tokens or hidden states|hidden states) than rank \d after step"
    with following(config), pytest.raises(RunnerLostError, match=message):
        answered(config)
