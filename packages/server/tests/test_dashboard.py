"""Live data is true, is sent only while it has readers, and ends with them."""

from __future__ import annotations

import asyncio
import json
import os
from base64 import b64decode
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from memory_server import ADMIN_KEY, MemoryServer
from pagewood.engine.observe.view import BranchView, EngineView, PoolView, StepView, TreeView
from pagewood.engine.text import Tokenizer
from pagewood.server.dashboard.branch_text import with_text
from pagewood.server.dashboard.live_data import Watchers
from pagewood.server.dashboard.processes import Processes
from pagewood.server.dashboard.rates import RateWindow, percentiles
from pagewood.server.dashboard.snapshots import SHARE, TREE_INTERVAL_S, Snapshots
from pagewood.server.messages import wire
from scripted import listening, paced, scripted_server

pytestmark = pytest.mark.anyio

LONG = {"max_new_tokens": 120, "ignore_eos": True}
POOL = PoolView(
    num_pages=4, page_size=16, num_free=4, num_cached=0, num_locked=0, num_private=0, pages_per_cell=1, cells=bytes(12)
)


def view(now_s: float = 0.0, **fields: Any) -> EngineView:
    """Return a view of an engine without requests."""
    given: dict[str, Any] = {"num_rows": 8, "num_steps": 0, "num_preempted": 0, "num_requests": 0, "requests": ()}
    return EngineView(now_s=now_s, paused="no", pool=POOL, **{**given, **fields})


def step(began_s: float, *, took_s: float = 0.01, num_decodes: int = 1, **fields: int) -> StepView:
    given = dict.fromkeys(("num_prompts", "num_prompt_tokens", "num_admitted", "num_cached_tokens"), 0)
    return StepView(
        began_s=began_s, took_s=took_s, num_decodes=num_decodes, num_decode_tokens=num_decodes, **{**given, **fields}
    )


async def messages(server: MemoryServer, num: int) -> list[dict[str, Any]]:
    """Return the next live messages with data of the engine."""
    found: list[dict[str, Any]] = []
    service = server.service
    async with aclosing(service.watchers.follow(service.live, service.status, "echo")) as stream:
        async for message in stream:
            data = json.loads(message)
            if data["engine"] is not None:
                found.append(data)
            if len(found) == num:
                break
    return found


async def test_requests_are_shown_where_they_stand_and_can_be_aborted(server: MemoryServer) -> None:
    bodies = [{"text": f"prompt {n}", "rid": f"mine-{n}", "sampling_params": LONG} for n in range(10)]
    async with paced(server):
        sending = [asyncio.create_task(server.client.post("/generate", json=body)) for body in bodies]
        await server.until(lambda: server.service.status.counters["num_running"] == 8)
        [live] = await messages(server, 1)
        engine = live["engine"]
        shown = dict(zip(live["names"], engine["requests"], strict=True))
        assert shown.keys() == {f"mine-{number}" for number in range(10)}
        stages = {name: request["stage"] for name, request in shown.items()}
        assert sorted(stages.values()) == ["running"] * 8 + ["waiting"] * 2
        waiting = next(name for name, stage in stages.items() if stage == "waiting")
        assert shown[waiting]["why"] == "All 8 rows are taken."
        assert (live["model"], live["status"], live["num_live"], engine["num_requests"]) == ("echo", "ready", 10, 10)
        cells = np.frombuffer(b64decode(engine["pool"]["cells"]), np.uint8).reshape(-1, 3)
        assert (cells[:, 2] == 255).sum() == engine["pool"]["num_private"] > 0
        for name in shown:
            assert (await server.client.post("/abort", json={"rid": name})).json() == {"aborted": 1}
        answers = [response.json() for response in await asyncio.gather(*sending)]
        begun = [answer["meta_info"]["finish_reason"]["type"] for answer in answers if "error" not in answer]
        assert begun == ["abort"] * 8  # what they had is theirs
        assert [answer["error"]["code"] for answer in answers if "error" in answer] == ["aborted"] * 2


async def test_a_request_far_back_in_the_queue_is_found_by_its_name(model_folder: Path) -> None:
    async with scripted_server(model_folder, None, limit=400) as server, paced(server):
        body = {"text": "Hi", "sampling_params": LONG}
        names = [f"Last-{number}" for number in range(330)]
        sending = [asyncio.create_task(server.client.post("/generate", json={**body, "rid": name})) for name in names]
        await server.until(lambda: server.service.status.counters["num_waiting"] == len(names) - 8)
        finds = ("", "last-32")
        shown = [(await server.admin.get("/dashboard/events", params={"find": find})).json() for find in finds]
        assert [one["engine"]["num_requests"] for one in shown] == [330, 330]
        assert [len(one["engine"]["requests"]) for one in shown] == [300, 310]
        assert set(shown[1]["names"][300:]) == {f"Last-32{digit}" for digit in range(10)}
        for one in sending:
            one.cancel()
        await asyncio.gather(*sending, return_exceptions=True)


async def test_nothing_is_computed_or_sent_while_nobody_watches(
    server: MemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[wire.Snapshot] = []

    def take(watchers: Watchers, snapshot: wire.Snapshot) -> None:
        taken.append(snapshot)

    monkeypatch.setattr(Watchers, "take", take)
    await server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 20})
    assert not taken
    monkeypatch.undo()
    assert len(await messages(server, 2)) == 2
    assert server.service.watchers.num_watching == 0


async def test_all_who_watch_get_the_same_bytes(server: MemoryServer) -> None:
    service = server.service
    streams = [service.watchers.follow(service.live, service.status, "echo") for _ in range(3)]
    first = await asyncio.gather(*(anext(stream) for stream in streams))
    assert len(set(first)) == 1
    await streams[0].aclose()
    assert service.watchers.num_watching == 2
    second = await asyncio.gather(*(anext(stream) for stream in streams[1:]))
    assert len(set(second)) == 1
    assert json.loads(second[0])["number"] > json.loads(first[0])["number"]
    newest = 0
    for _ in range(3):  # one that is slow misses what comes meanwhile
        newest = json.loads(await anext(streams[1]))["number"]
    assert json.loads(await anext(streams[2]))["number"] == newest + 1
    for stream in streams[1:]:
        await stream.aclose()
    assert service.watchers.num_watching == 0
    await asyncio.sleep(0.01)
    assert "live data" not in {task.get_name() for task in asyncio.all_tasks()}


async def test_a_stream_over_a_socket_ends_with_its_client(server: MemoryServer) -> None:
    events, key = {"accept": "text/event-stream"}, {"x-api-key": ADMIN_KEY}
    async with listening(server) as url, httpx.AsyncClient(base_url=url, headers=key, timeout=60) as client:
        async with client.stream("GET", "/dashboard/events", headers=events) as response:
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            found: list[dict[str, Any]] = []
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    found.append(json.loads(line.removeprefix("data: ")))
                if len(found) == 3:
                    break
        await server.until(lambda: server.service.watchers.num_watching == 0)
        assert [one["number"] for one in found] == [found[0]["number"] + number for number in range(3)]
        one = (await client.get("/dashboard/events")).json()
        assert one["engine"]["num_rows"] == 8
        await server.until(lambda: server.service.watchers.num_watching == 0)


async def test_text_of_the_cache_is_shown_only_if_the_operator_says_so(model_folder: Path) -> None:
    for shows in (False, True):
        async with scripted_server(model_folder, None, dashboard_text=shows) as server:
            await server.post("/v1/completions", {"prompt": "A secret prompt that is long enough", "max_tokens": 4})
            [live] = await messages(server, 1)
            assert live["shows_text"] is shows
            [branch] = live["engine"]["tree"]["branches"]
            assert branch["tokens"] == ""
            assert ("A secret prompt" in branch["text"]) is shows
            assert ("secret" in json.dumps(live)) is shows


class Clock:
    """A clock, an engine and an outbox for `Snapshots`."""

    def __init__(self, took_s: float) -> None:
        self.now_s, self.took_s = 100.0, took_s
        self.calls: list[Any] = []
        self.frames: list[bytes] = []

    def __call__(self) -> float:
        return self.now_s

    def watch(self, *, is_on: bool) -> None:
        self.calls.append(is_on)

    def view(self, *, wanted: tuple[str, ...], shows_tree: bool, shows_tokens: bool) -> EngineView:
        assert wanted == ("a",)
        self.calls.append((round(self.now_s, 2), shows_tree))
        self.now_s += self.took_s
        return view(self.now_s)

    def send(self, frame: bytes) -> None:
        self.frames.append(frame)


def run(clock: Clock, for_s: float, *, lease_s: float) -> list[Any]:
    """Watch for `lease_s`, and return what the engine was asked in `for_s`."""
    made: Any = clock
    snapshots = Snapshots(made, clock, incarnation=3, clock=clock)
    snapshots.turn()
    assert not clock.calls
    snapshots.watch(wire.Watch(for_s=lease_s, wanted=("a",)))
    end_s = clock.now_s + for_s
    while clock.now_s < end_s:
        snapshots.turn()
        clock.now_s += 0.01
    assert snapshots.is_watched == (lease_s > for_s)
    return clock.calls


def test_snapshots_come_at_their_interval_and_end_with_the_lease() -> None:
    clock = Clock(took_s=0.0)
    calls = run(clock, 4.0, lease_s=2.0)
    assert (calls[0], calls[-1], len(calls)) == (True, False, 10)
    assert [call[1] for call in calls[1:-1]] == [True, False, False, False] * 2
    message = wire.from_engine.decode(clock.frames[0])
    assert isinstance(message, wire.Snapshot)
    assert (message.incarnation, message.view.num_rows) == (3, 8)


def test_slow_snapshots_take_a_bounded_share_of_the_time() -> None:
    clock = Clock(took_s=0.02)
    calls = run(clock, 60.0, lease_s=100.0)
    num_trees = sum(call[1] for call in calls[1:])
    assert num_trees == pytest.approx(60 * SHARE / 0.02, abs=1)
    assert len(calls) - 1 - num_trees <= 60 * SHARE / 0.02 + 1
    assert TREE_INTERVAL_S < 0.02 / SHARE


def test_rates_and_percentiles_are_those_of_their_windows() -> None:
    window = RateWindow()
    window.add(view(0.0))
    for second in range(100):
        steps = (step(second + 0.2, took_s=0.5, num_decodes=4, num_prompt_tokens=30, num_cached_tokens=10),)
        window.add(view(second + 1.0, steps=steps, first_tokens_s=(second / 100,)))
    rates = window.rates(100.0)
    assert (rates.output_tokens, rates.prompt_tokens, rates.steps, rates.busy) == (4.0, 30.0, 1.0, 0.5)
    assert rates.cached_share == 0.25
    assert rates.first_token is not None
    assert (rates.first_token.p50, rates.first_token.p99) == (0.69, 0.99)  # of 0.39 ... 0.99
    empty = RateWindow().rates(5.0)
    assert (empty.output_tokens, empty.cached_share, empty.step) == (0.0, None, None)


def test_weighted_percentiles_count_a_value_by_its_weight() -> None:
    values, weights = [3.0, 1.0, 2.0], [1, 0, 99]
    repeated = percentiles([value for value, weight in zip(values, weights, strict=True) for _ in range(weight)])
    assert percentiles(values, weights=weights) == repeated
    assert percentiles(values, weights=[0, 0, 0]) is None


def test_this_process_is_seen_with_its_memory() -> None:
    processes = Processes()
    before = processes.look()
    sum(range(2_000_000))
    [mine] = [one for one in processes.look() if one.pid == os.getpid()]
    assert (mine.name, before[0].cpu) == ("http", 0.0)
    assert mine.rss_bytes > 10_000_000
    assert mine.cpu > 0


def test_branches_get_text_and_lose_their_ids(tokenizer: Tokenizer) -> None:
    fields: dict[str, Any] = dict.fromkeys(
        ("page", "start", "num_tokens", "num_total", "num_children", "num_leases", "idle", "num_hits"), 0
    )
    tokens = tokenizer.encode("Hello <b>", add_special_tokens=False).astype("<i4").tobytes()
    branch = BranchView(parent=-1, namespace="", is_locked=False, tokens=tokens, **fields)
    tree = TreeView(branches=(branch,), num_runs=1, is_complete=True)
    found = with_text(tokenizer, wire.Snapshot(incarnation=0, view=view(tree=tree)))
    assert found.view.tree is not None
    assert [(one.text, one.tokens) for one in found.view.tree.branches] == [("Hello <b>", b"")]
    assert msgspec.msgpack.decode(wire.encode(found), type=wire.ToHttp) == found
