"""Tiers of ranks on several hosts: each host keeps the parts of its ranks, and a page is there when all parts are."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from group_in_threads import ranks_are_threads
from node_threads import following, free_port
from nodes import NodeProcess
from pagewood.engine.api import EngineConfig, SamplingParams
from pagewood.engine.core.loop import RunnerLostError
from pagewood.engine.core.memory.divided_kv import DividedKV
from pagewood.engine.offline.llm import LLM
from pagewood.engine.runner.ranks.group import Group
from pagewood.engine.runner.ranks.messages import MovePages
from pagewood.engine.runner.ranks.ranked_pages import FollowedPages, RankedPages, RankedStore, StoreElsewhere
from pagewood.kvpool.tiers.pages.device import ChainedPages
from ranked_engines import engine_of, is_alive, one_process
from seeded_faults import Edit, seed_fault

PROMPT = list(range(100, 200))
NUM_PAGES, NUM_CACHED = 6, 96  # whole pages of it, and their tokens
OTHERS = [list(range(start, start + 100)) for start in range(200, 400, 50)]
SAMPLING = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
SIZES: dict[str, Any] = {"max_running": 4, "max_length": 200, "max_total_tokens": 256}
NO_DISK: dict[str, Any] = {"disk_cache_path": None, "disk_cache_gb": None}
SMALL_GB = 0.0007
"""Of 21 pages of each host, so that pages also come back from the disks."""
BY_REQUEST: dict[str, Any] = {"enable_dp_attention": True, "max_total_tokens": 416}
"""Each rank has memory for a request of the longest length."""
Found = list[tuple[tuple[int, ...], int]]
pytestmark = pytest.mark.usefixtures("patient_requests")


def options_of(folder: Path, **others: Any) -> dict[str, Any]:
    return {
        **SIZES, "tensor_parallel_size": 2, "nnodes": 2, "num_threads": 1, "master_addr": f"127.0.0.1:{free_port()}",
        "host_cache_gb": 0.02, "disk_cache_path": str(folder), "disk_cache_gb": 0.05, **others,
    }  # fmt: skip


def first(llm: LLM) -> Found:
    """Return the tokens of a prompt, and how many of its own were cached."""
    return [(one.tokens, one.num_cached_tokens) for one in llm.generate(PROMPT, SAMPLING)]


def twice(llm: LLM) -> Found:
    """Return the same before it was evicted, and afterwards."""
    found = first(llm)
    llm.generate(OTHERS, SAMPLING)  # evicts it
    return found + first(llm)


def ask_for_long(llm: LLM) -> None:
    for start in range(10):
        llm.generate([PROMPT, [*range(start, start + 100)], *OTHERS], SAMPLING)


def tiers_of(llm: LLM) -> dict[str, int]:
    engine = engine_of(llm)
    engine.measure()
    measured = engine.measurement()
    assert measured is not None
    return measured.tiers


def started(options: dict[str, Any], ask: Callable[[LLM], Found] = twice) -> tuple[Found, dict[str, int]]:
    """Return what an engine finds whose other nodes are threads, and what it has copied."""
    with following(EngineConfig(**options)) as errors, LLM(**options) as llm:
        found, tiers = ask(llm), tiers_of(llm)
    assert not errors
    return found, tiers


@pytest.fixture(scope="module")
def expected() -> tuple[int, ...]:
    """The tokens of one process."""
    with one_process(**SIZES) as llm:
        return llm.generate(PROMPT, SAMPLING)[0].tokens


def slow(name: str, **options: Any) -> Any:
    return pytest.param(options, id=name, marks=pytest.mark.slow)


@pytest.mark.parametrize("others", [
    pytest.param({}, id="ranks"),
    slow("stages", tensor_parallel_size=1, pipeline_parallel_size=2),
    slow("both", pipeline_parallel_size=2, num_threads=2),
    slow("drafts", speculative="draft"),
    slow("shared folder", **NO_DISK, remote_cache="", remote_cache_gb=0.05),
])  # fmt: skip
def test_pages_of_all_hosts_come_back_from_the_host_and_from_stores(
    others: dict[str, Any], expected: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV that another group has computed is read by all ranks; wrong KV would change the tokens."""
    ranks_are_threads(monkeypatch)
    options = options_of(tmp_path, **others)
    if "remote_cache" in options:
        options["remote_cache"] = str(tmp_path)
    for num_cached in (0, NUM_CACHED):
        found, tiers = started(options)
        assert found == [(expected, num_cached), (expected, NUM_CACHED)]
        assert tiers["num_loaded"] >= NUM_PAGES
        assert tiers["num_failed"] == 0
    assert tiers["num_fetched"] >= NUM_PAGES
    if others.get("num_threads") == 2:
        assert {one.name for one in tmp_path.iterdir()} == {f"shard-{rank}.pages" for rank in (0, 2, 3)}


def check_requests(folder: Path, monkeypatch: pytest.MonkeyPatch, **others: Any) -> None:
    """Check that requests of all ranks get their pages back from the host of their rank, also after a restart."""
    ranks_are_threads(monkeypatch)
    copies: set[tuple[int, bool, str | None]] = set()
    move_pages = Group.move_pages

    def noted(group: Group, message: MovePages, own: Callable[[], None], *, ranks: range) -> Any:
        if message.slots:
            copies.add((ranks.start, message.is_out, message.store))
        return move_pages(group, message, own, ranks=ranks)

    monkeypatch.setattr(Group, "move_pages", noted)
    options = options_of(folder, **{**BY_REQUEST, **others})
    if "remote_cache" in options:
        options["remote_cache"] = str(folder)
    first_there = options["tensor_parallel_size"] // 2
    prompts: list[list[int]] = []

    def asked_alone(llm: LLM) -> list[int]:
        found = [llm.generate([prompt], SAMPLING)[0] for prompt in prompts]
        assert [one.tokens for one in found] == expected
        return [one.num_cached_tokens for one in found]

    with following(EngineConfig(**options)) as errors, LLM(**options) as llm:
        kv = engine_of(llm)._kv  # pyright: ignore[reportPrivateUsage]
        assert isinstance(kv, DividedKV)
        while not all(space.num_cached for space in kv.spaces):
            more = [[*range(start, start + 100)] for start in range(len(prompts) + 10, len(prompts) + 15)]
            prompts += more
            llm.generate(more, SAMPLING)
        with one_process(**SIZES) as alone:
            expected = [one.tokens for one in alone.generate(prompts, SAMPLING)]
        while not {(rank, False, None) for rank in range(first_there, 2 * first_there)} <= copies:
            llm.generate(OTHERS, SAMPLING)
            asked_alone(llm)
        assert tiers_of(llm)["num_failed"] == 0
    assert not errors
    assert {rank for rank, _, _ in copies} == {*range(first_there, 2 * first_there)}
    with following(EngineConfig(**options)) as errors, LLM(**options) as llm:
        assert asked_alone(llm) == [NUM_CACHED] * len(prompts)
        assert tiers_of(llm)["num_fetched"] == NUM_PAGES * len(prompts)
    assert not errors
    for rank in range(first_there, 2 * first_there):
        name = "disk" if options["disk_cache_path"] else "remote"
        assert {(rank, True, None), (rank, True, name)} <= copies


FOUR: dict[str, Any] = {"tensor_parallel_size": 4, "num_threads": 2, "max_total_tokens": 832}


@pytest.mark.parametrize("others", [
    pytest.param({}, id="two"), slow("four", **FOUR),
    slow("shared folder", **NO_DISK, remote_cache="", remote_cache_gb=0.05),
])  # fmt: skip
def test_pages_of_requests_come_back_on_the_host_of_their_rank(
    others: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_requests(tmp_path, monkeypatch, **others)


FAULTS_OF_REQUESTS: dict[str, list[Edit]] = {
    "a rank copies nothing in": [
        (FollowedPages, "_moved", "self._own.write(message.pages, images, slots, _ignore)", "pass"),
    ],
    "pages beside the right ones": [
        (ChainedPages, "_divided", "divmod(page, self._num_pages)", "divmod(page ^ 1, self._num_pages)"),
    ],
    "images of another slot": [(RankedPages, "exchange", "[slot for slot, _ in places]", "[0 for _ in places]")],
    "a disk is not asked": [(StoreElsewhere, "exists", "return self.get(keys, [])", "return [False] * len(keys)")],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS_OF_REQUESTS)
def test_a_page_that_is_wrong_on_another_host_is_noticed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed_fault(FAULTS_OF_REQUESTS[name], monkeypatch)
    with pytest.raises(AssertionError):
        check_requests(tmp_path, monkeypatch)


@pytest.mark.slow
def test_what_only_the_kv_memory_has_is_stored_at_the_end(
    expected: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks_are_threads(monkeypatch)
    options = options_of(tmp_path, cache_write_policy="write_back")
    found, tiers = started(options, first)
    assert (found, tiers["num_demoted"]) == ([(expected, 0)], 0)
    assert started(options, first)[0] == [(expected, NUM_CACHED)]


def test_a_page_that_lacks_the_part_of_a_host_is_computed_and_stored_again(
    expected: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks_are_threads(monkeypatch)
    options = options_of(tmp_path)
    started(options, first)
    (tmp_path / "shard-1.pages").unlink()
    assert started(options, first)[0] == [(expected, 0)]
    assert started(options, first)[0] == [(expected, NUM_CACHED)]


@pytest.mark.parametrize("fails_below", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_copy_that_fails_on_another_host_is_counted(
    fails_below: bool, expected: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its store, then its host cache still has the page; or already in its memory, then it is computed."""
    moved = FollowedPages._moved  # pyright: ignore[reportPrivateUsage]

    def fail(pages: FollowedPages, message: MovePages) -> list[bool]:
        if fails_below and message.store is None:
            return moved(pages, message)
        raise OSError("no space left")

    ranks_are_threads(monkeypatch)
    monkeypatch.setattr(FollowedPages, "_moved", fail)
    options = options_of(tmp_path)
    for _ in range(2):  # node 0 has all pages on its disk when the second one starts
        found, tiers = started(options)
        assert found == [(expected, 0), (expected, NUM_CACHED if fails_below else 0)]
        assert tiers["num_failed"] > 0
        assert tiers["num_stored"] == 0


FAULTS: dict[str, list[Edit]] = {
    "a rank copies nothing in": [
        (FollowedPages, "_moved", "self._own.write(message.pages, images, slots, _ignore)", "pass"),
    ],
    "a rank copies to other pages": [(FollowedPages, "_moved", "write(message.pages", "write([0] * len(slots)")],
    "a rank copies to other images": [(FollowedPages, "_moved", "message.slots", "[0] * len(message.slots)")],
    "a page is there when rank 0 has it": [(RankedStore, "get", "return [all", "return found or [all")],
    "a page is there before all ranks have it": [
        (Group, "move_pages", "not all(one in self._moved for one in awaited)", "False"),
        (FollowedPages, "_move", "self._moved(message)", "threading.Event().wait(0.3) or self._moved(message)"),
    ],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_part_that_is_wrong_changes_the_tokens(
    name: str, expected: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks_are_threads(monkeypatch)
    monkeypatch.setattr("pagewood.engine.runner.ranks.ranked_pages.threading", threading, raising=False)
    seed_fault(FAULTS[name], monkeypatch)
    options = options_of(tmp_path)
    found, _ = started(options)
    (tmp_path / "shard-1.pages").unlink()
    assert any(tokens != expected for tokens, _ in found + started(options)[0])


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank", "node"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("is_out", [False, True])
@pytest.mark.parametrize("store", [None, "disk"])
@pytest.mark.parametrize("others", [pytest.param({}, id="parts"), slow("requests", **BY_REQUEST)])
def test_a_host_that_is_lost_during_a_copy_ends_the_group(
    victim: str, number: signal.Signals, is_out: bool, store: str | None, others: dict[str, Any],
    expected: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With a typed error; the next group has what is on the disks of both. All ranks are processes."""
    options = options_of(tmp_path / "kv", host_cache_gb=SMALL_GB, **others)
    is_over, move_pages = threading.Event(), Group.move_pages
    config = EngineConfig(**options, node_rank=1)
    nodes = [NodeProcess(config, tmp_path / "log")]

    def lose(group: Group, message: MovePages, own: Callable[[], None], *, ranks: range) -> Any:
        if message.slots and message.is_out == is_out and message.store == store and not is_over.is_set():
            is_over.set()
            os.kill(nodes[0].process.pid if victim == "node" else nodes[0].ranks()[0], number)
        return move_pages(group, message, own, ranks=ranks)

    try:
        with LLM(**options) as llm:
            assert twice(llm) == [(expected, 0), (expected, NUM_CACHED)]
            assert tiers_of(llm)["num_loaded"] >= NUM_PAGES
            while tiers_of(llm)["num_stored"] < NUM_PAGES:  # which are the first ones
                llm.generate(PROMPT[:1], SAMPLING)
            (rank,) = nodes[0].ranks()
            monkeypatch.setattr(Group, "move_pages", lose)
            with pytest.raises(RunnerLostError, match=r"rank 1 on node 1"):
                ask_for_long(llm)
        assert is_over.is_set()
        if victim == "node":
            nodes[0].close()
            nodes.append(NodeProcess(config, tmp_path / "log"))
        with LLM(**options) as llm:
            assert first(llm) == [(expected, NUM_CACHED)]
            assert tiers_of(llm)["num_fetched"] >= NUM_PAGES
        assert not is_alive(rank)
    finally:
        nodes[-1].close()
