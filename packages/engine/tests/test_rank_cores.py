"""Ranks get disjoint cores, those of one memory node where they can."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagewood.engine.runner.ranks.cores import divided_cores, threads_on


def machine(folder: Path, processors: list[tuple[int, int]]) -> Path:
    """Write a machine of logical processors, each (memory node, core)."""
    for number, (node, core) in enumerate(processors):
        topology = folder / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        (topology.parent / f"node{node}").mkdir()
        (topology / "physical_package_id").write_text(f"{node}\n")
        (topology / "core_id").write_text(f"{core}\n")
    return folder


def usable_are(processors: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def usable(_: int) -> set[int]:
        return processors

    monkeypatch.setattr(os, "sched_getaffinity", usable, raising=False)


@pytest.mark.parametrize(
    ("processors", "count", "expected"),
    [
        pytest.param([(0, 0), (0, 1)], 2, [[0], [1]], id="two cores"),
        pytest.param([(0, 0), (1, 0), (0, 1), (1, 1)], 2, [[0, 2], [1, 3]], id="nodes whose numbers alternate"),
        pytest.param([(0, 0), (0, 1), (0, 0), (0, 1)], 2, [[0, 2], [1, 3]], id="hyperthreads stay together"),
        pytest.param([(0, core) for core in range(5)], 2, [[0, 1], [2, 3, 4]], id="an odd number"),
        pytest.param([(node, core) for node in range(2) for core in range(4)], 4, [[0, 1], [2, 3], [4, 5], [6, 7]],
                     id="two ranks on each node"),
    ],
)  # fmt: skip
def test_cores_are_divided(
    processors: list[tuple[int, int]], count: int, expected: list[list[int]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    usable_are(set(range(len(processors))), monkeypatch)
    assert divided_cores(count, root=machine(tmp_path, processors)) == expected


def test_a_system_that_says_nothing_has_processors_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usable_are({2, 3, 7, 9}, monkeypatch)
    assert divided_cores(2, root=tmp_path) == [[2, 3], [7, 9]]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no threads")
def test_the_calling_thread_is_free_again() -> None:
    before = os.sched_getaffinity(0)
    with threads_on([min(before)]):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before
    with threads_on([]):
        assert os.sched_getaffinity(0) == before
