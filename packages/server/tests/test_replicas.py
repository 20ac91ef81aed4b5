"""Three engines behind one server: affinity, priorities and quotas over all, deaths, and commands for all."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echo_adapters import write_echo_adapter
from memory_server import NUM_ROWS, MemoryServer
from pagewood.engine.api import EngineConfig, TenantQuota
from pagewood.engine.assembly import grammar_compiler
from pagewood.engine.grammar import Backend, open_backend
from pagewood.engine.text import Tokenizer
from pagewood.server.config import ServeConfig
from pagewood.server.http.errors import unavailable
from pagewood.server.metrics.endpoint import MetricsEndpoint, text_of
from pagewood.server.replicas.division import (
    VISIBLE_DEVICES,
    address_of_each,
    check_fleet,
    cuda_devices,
    devices_of_each,
    engine_of_each,
)
from pagewood.server.replicas.fleet_status import FleetStatus
from pagewood.server.requests.adapters import ServedAdapters
from pagewood.server.requests.status import EngineState
from replica_server import NUM, NUM_PLACES, Ask, close_gates, dispatcher_of, open_gates, placed, running

pytestmark = pytest.mark.anyio

LOST = unavailable("The engine process died.", code="engine_lost")


@pytest.fixture
async def server(model_folder: Path, tokenizer: Tokenizer) -> AsyncGenerator[MemoryServer]:
    async for server in running(model_folder, tokenizer):
        yield server


async def test_answers_are_those_of_one_engine_and_all_engines_work(server: MemoryServer) -> None:
    close_gates(server)
    asks = [Ask(server, f"prompt {number}") for number in range(12)]
    await server.until(lambda: placed(server) == [4, 4, 4])
    open_gates(server)
    for ask in asks:
        await ask.check()


async def drain_favourite(server: MemoryServer) -> Callable[[], Awaitable[None]]:
    """Drain the replica that gets a request if all are idle; return how to let it take requests again.

    So what is cached meanwhile is elsewhere, and a request comes to it only because it is there.
    """
    await Ask(server, "it shows which one").check()
    await server.until_idle()
    status = server.service.status
    assert isinstance(status, FleetStatus)
    cached = [one.counters["num_cached_pages"] for one in status.replicas]
    number = cached.index(max(cached))
    (await server.admin.post("/drain", json={"replica": number})).raise_for_status()

    async def undo() -> None:
        (await server.admin.post("/drain", json={"replica": number, "is_draining": False})).raise_for_status()

    return undo


async def test_a_second_turn_goes_where_its_prefix_is(server: MemoryServer) -> None:
    undo = await drain_favourite(server)
    for number in range(6):
        first = f"conversation {number}: " + "word " * 12
        num_blocks = dispatcher_of(server).num_cached_blocks
        assert (await Ask(server, first).check())["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        await server.until(lambda before=num_blocks: dispatcher_of(server).num_cached_blocks > before)
    await undo()
    for number in range(6):
        second = await Ask(server, f"conversation {number}: " + "word " * 12 + "and more").check()
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64


async def test_no_request_of_a_dead_replica_is_lost(server: MemoryServer) -> None:
    """Requests that run, that wait on a replica, and that wait for a place, through three deaths."""
    close_gates(server)
    asks = [Ask(server, f"prompt {number}", max_tokens=60) for number in range(NUM_PLACES + 6)]
    await server.until(lambda: placed(server) == [NUM_ROWS] * NUM and dispatcher_of(server).num_waiting == 6)
    for one in server.replicas:
        one.gate.allow(20)
    await server.until(lambda: all(one.gate.is_held for one in server.replicas))
    for number in range(NUM):
        server.kill(number)
        server.replicas[number].gate.close()
        await server.until(lambda at=number: dispatcher_of(server).replicas[at].is_joined)
        await server.until(  # some may have ended before a gate was closed
            lambda: (
                placed(server) == [NUM_ROWS] * NUM
                and dispatcher_of(server).num_waiting == server.service.live.num_live - NUM_PLACES
            )
        )
    open_gates(server)
    for ask in asks:
        await ask.check()
    assert server.service.live.incidents.num_lost == 0
    assert server.service.live.incidents.num_retried >= NUM_PLACES


async def test_a_grammar_is_compiled_again_if_its_replica_dies_meanwhile(
    model_folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, may_end = list[object](), threading.Event()

    def open_late(*arguments: Any, **options: Any) -> Backend:
        opened.append(arguments)
        assert len(opened) > 1 or may_end.wait(60)
        return open_backend(*arguments, **options)

    monkeypatch.setattr(grammar_compiler, "open_backend", open_late)
    said = {"prompt": "x", "max_tokens": 12, "seed": 3, "temperature": 0.7, "guided_regex": "[ab]{4,9}c"}
    async with aclosing(running(model_folder, tokenizer, grammars=True)) as servers:
        server = await anext(servers)
        asking = asyncio.create_task(server.post("/v1/completions", said))
        await server.until(lambda: len(opened) == 1)
        server.kill(placed(server).index(1))
        text = (await asking).json()["choices"][0]["text"]
        assert re.fullmatch("[ab]{4,9}c", text)
        assert (await server.post("/v1/completions", said)).json()["choices"][0]["text"] == text
        assert server.service.live.incidents.num_retried == 1
        may_end.set()


async def test_others_serve_while_a_replica_is_away(server: MemoryServer) -> None:
    close_gates(server)
    asks = [Ask(server, f"prompt {number}") for number in range(9)]
    await server.until(lambda: placed(server) == [3, 3, 3])
    server.kill(1, is_restarted=False)
    ready = (await server.client.get("/ready")).json()
    assert ready["status"] == "ready"
    assert "replica 1" in ready["detail"]
    assert [one["status"] for one in ready["replicas"]] == ["ready", "down", "ready"]
    await server.until(lambda: sum(placed(server)) == 9)
    assert placed(server)[1] == 0
    open_gates(server)
    for ask in asks:
        await ask.check()
    server.restart(1)
    await server.until(lambda: dispatcher_of(server).replicas[1].is_joined)


async def test_requests_wait_while_no_replica_works(server: MemoryServer) -> None:
    close_gates(server)
    asks = [Ask(server, f"prompt {number}") for number in range(NUM_PLACES + 2)]
    await server.until(lambda: dispatcher_of(server).num_waiting == 2)
    for number in range(NUM):
        server.kill(number, is_restarted=False)
    assert server.service.status.state is EngineState.DOWN
    assert (await server.client.get("/ready")).status_code == 503
    asks.append(Ask(server, "a prompt that comes meanwhile"))
    await server.until(lambda: dispatcher_of(server).num_waiting == NUM_PLACES + 3)
    for number in range(NUM):
        server.restart(number)
    for ask in asks:
        await ask.check()


async def test_a_planned_end_moves_requests_and_suspects_none(server: MemoryServer) -> None:
    close_gates(server)
    asks = [Ask(server, f"prompt {number}") for number in range(9)]
    await server.until(lambda: placed(server) == [3, 3, 3])
    dispatcher_of(server).replica_lost(2, None, LOST, is_planned=True)
    await server.until(lambda: sum(placed(server)) == 9)
    assert placed(server)[2] == 0
    dispatcher_of(server).replicas[2].incarnation = 0
    open_gates(server)
    for ask in asks:
        await ask.check()


async def test_a_high_priority_request_waits_behind_no_low_one(server: MemoryServer) -> None:
    close_gates(server)
    low = [Ask(server, f"low {number}", max_tokens=40) for number in range(NUM_PLACES + 5)]
    await server.until(lambda: placed(server) == [NUM_ROWS] * NUM and dispatcher_of(server).num_waiting == 5)
    high = Ask(server, "high", max_tokens=3, priority=5)
    await server.until(lambda: dispatcher_of(server).num_waiting == 6)
    assert dispatcher_of(server).waiting_by_priority() == {"0": 6}
    open_gates(server)
    await high.check()
    for ask in low:
        await ask.check()


async def test_a_low_priority_request_is_answered_while_high_ones_wait(
    model_folder: Path, tokenizer: Tokenizer
) -> None:
    """It has waited 10 s, so it is among the next 8 that get a place, each of the four times that it waits."""
    now_s = 0.0
    async with aclosing(running(model_folder, tokenizer, router_clock=lambda: now_s)) as servers:
        server = await anext(servers)
        close_gates(server)
        before = [Ask(server, f"before {number}", max_tokens=3, priority=5) for number in range(NUM_PLACES)]
        await server.until(lambda: placed(server) == [NUM_ROWS] * NUM)
        low = Ask(server, "low", max_tokens=3)
        await server.until(lambda: dispatcher_of(server).num_waiting == 1)
        high = [Ask(server, f"high {number}", max_tokens=3, priority=5) for number in range(80)]
        await server.until(lambda: dispatcher_of(server).num_waiting == 81)
        ended: list[asyncio.Task[Any]] = []
        asks = (*before, low, *high)
        for ask in asks:
            ask.task.add_done_callback(ended.append)
        now_s = 11.0
        open_gates(server)
        for ask in asks:
            await ask.check()
        # It gets its last place behind 4 * 8 others at most, beside those of the other engines and those of before.
        assert ended.index(low.task) < 4 * 8 + 2 * NUM_PLACES < len(asks) - NUM_PLACES


async def test_a_quota_is_counted_once_for_all_replicas(model_folder: Path, tokenizer: Tokenizer) -> None:
    quotas = (TenantQuota("*", max_running=4, max_tokens_in_flight=300),)
    async with aclosing(running(model_folder, tokenizer, quotas=quotas)) as servers:
        await _check_quota(await anext(servers))


async def _check_quota(server: MemoryServer) -> None:
    refused = await server.post("/v1/completions", {"prompt": "long", "max_tokens": 350})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "quota_exceeded"
    close_gates(server)
    asks = [Ask(server, f"prompt {number}") for number in range(10)]
    await server.until(lambda: dispatcher_of(server).num_at_quota == 6)
    assert sum(placed(server)) == 4
    assert server.service.status.counters["num_waiting"] >= 6
    open_gates(server)
    for ask in asks:
        await ask.check()


async def test_commands_reach_all_replicas(server: MemoryServer) -> None:
    for number in range(6):
        await Ask(server, f"{number} " + "word " * 8).check()
    paused = await server.admin.post("/pause", json={})
    assert paused.status_code == 200
    asks = [Ask(server, f"prompt {number}") for number in range(6)]
    await server.until(lambda: sum(placed(server)) == 6)
    server.kill(0)  # the next one begins paused, too
    await server.until(lambda: dispatcher_of(server).replicas[0].is_joined and sum(placed(server)) == 6)
    await asyncio.sleep(0.1)
    assert not any(ask.task.done() for ask in asks)
    assert server.service.live.num_live == 6
    resumed = await server.admin.post("/resume", json={})
    assert resumed.status_code == 200
    for ask in asks:
        await ask.check()
    await server.until_idle()
    cached = server.service.status.counters["num_cached_pages"]
    flushed = await server.admin.post("/flush_cache", json={})
    assert flushed.json()["flushed_tokens"] == cached * 16
    await server.until(lambda: dispatcher_of(server).num_cached_blocks == 0)


async def test_cancelled_requests_free_their_places(server: MemoryServer) -> None:
    close_gates(server)
    asks = [Ask(server, f"prompt {number}") for number in range(NUM_PLACES)]
    await server.until(lambda: sum(placed(server)) == NUM_PLACES)
    waiting = Ask(server, "it waits")
    await server.until(lambda: dispatcher_of(server).num_waiting == 1)
    waiting.task.cancel()
    await server.until(lambda: dispatcher_of(server).num_waiting == 0 and server.service.live.num_ending == 0)
    asks[0].task.cancel()
    late = Ask(server, "it comes late")
    open_gates(server)
    await late.check()
    for ask in asks[1:]:
        await ask.check()


async def test_sums_of_dead_engines_stay_in_the_metrics(server: MemoryServer) -> None:
    for number in range(6):
        await Ask(server, f"prompt {number}").check()
    await server.until_idle()
    before = samples(server)
    assert before["pagewood_step_seconds_count"] > 0
    server.kill(0)
    server.kill(1)
    after = samples(server)
    for name in ("pagewood_step_seconds_count", "vllm:num_preemptions_total", "sglang:prompt_tokens_total"):
        assert after[name] == before[name], name
    await server.until(lambda: all(one.is_joined for one in dispatcher_of(server).replicas))
    (await server.admin.post("/pause", json={})).raise_for_status()
    asks = [Ask(server, f"prompt {number}") for number in range(NUM_PLACES + 3)]
    for name in ("pagewood_num_requests_waiting", "vllm:num_requests_waiting", "sglang:num_queue_reqs"):
        await server.until(lambda name=name: samples(server)[name] == NUM_PLACES + 3)
    assert samples(server)["pagewood_num_requests_waiting_by_priority"] == NUM_PLACES + 3
    assert dispatcher_of(server).num_waiting == 3
    (await server.admin.post("/resume", json={})).raise_for_status()
    for ask in asks:
        await ask.check()


def samples(server: MemoryServer) -> dict[str, float]:
    """Return the sum of each series of `/metrics` by its name."""
    endpoint = MetricsEndpoint(metrics=server.metrics, models=server.frontend.models)
    found: dict[str, float] = {}
    for line in text_of(list(endpoint.collect())).decode().splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_threads": 1}, "^replicas must leave each engine a thread, got 2 with 1 threads or cores"),
        (
            {"device": "cuda"},
            "^replicas must leave each engine a CUDA device for each of its 1 ranks, got 2 with 1 devices$",
        ),
        (
            {"device": "cuda", "tensor_parallel_size": 2},
            "^replicas must leave each engine a CUDA device for each of its 2 ranks, got 2 with 1 devices$",
        ),
    ],
)
def test_what_stands_against_replicas_is_refused_by_name(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv(VISIBLE_DEVICES, "4")
    engine = replace(EngineConfig(num_threads=8), **options)
    with pytest.raises(ValueError, match=message):
        ServeConfig(engine=engine, served_model_name="m", model_folder=model_folder, replicas=2)


def test_each_engine_has_devices_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE_DEVICES, "4, GPU-ab,7,6")
    engine = EngineConfig(num_threads=8, device="cuda", tensor_parallel_size=2)
    check_fleet(engine, num_replicas=2, num_cores=8, num_devices=len(cuda_devices()))
    assert devices_of_each(engine, 2) == [("4", "GPU-ab"), ("7", "6")]
    assert devices_of_each(replace(engine, device="cpu"), 2) == [(), ()]
    monkeypatch.setenv(VISIBLE_DEVICES, "")
    assert cuda_devices() == ()


@pytest.mark.parametrize(
    ("engine", "server", "message"),
    [
        ({}, {"prefill_replicas": 3}, r"^prefill_replicas must be >= 0 and less than replicas \(3\), got 3"),
        ({}, {"prefill_replicas": 1}, "^prefill_replicas must be 0 without remote_cache, where .* share KV, got 1"),
        ({}, {"replicas": 1, "prefill_replicas": 1}, r"^prefill_replicas must be .* less than replicas \(1\), got 1"),
        ({"role": "decode"}, {}, "^role must be both with replicas, got 'decode': see prefill_replicas"),
        ({"cache_write_policy": "write_back"}, {"prefill_replicas": 1}, "^cache_write_policy must be write_through"),
        ({"decision_log": "log"}, {"prefill_replicas": 1}, "^role must be both with decision_log"),
        (
            {},
            {"kv_events": "tcp://*:5557", "kv_events_replay": "tcp://*:5559"},
            r"^kv_events and kv_events_replay must leave each replica addresses of its own.*'tcp://\*:5559'",
        ),
        (
            {},
            {"kv_events": "tcp://*:65534"},
            r"must have ports of at most 65535 for all replicas, got 'tcp://\*:65534'",
        ),
    ],
)
def test_a_fleet_that_cannot_be_is_refused(
    model_folder: Path, engine: dict[str, Any], server: dict[str, Any], message: str
) -> None:
    shared = {"remote_cache": "shm:x", "remote_cache_gb": 1.0, "host_cache_gb": 1.0}
    options: dict[str, Any] = {"num_threads": 8, **(shared if engine else {}), **engine}
    fields: dict[str, Any] = {"served_model_name": "m", "model_folder": model_folder, "replicas": 3, **server}
    with pytest.raises(ValueError, match=message):
        ServeConfig(engine=EngineConfig(**options), **fields)


def test_each_engine_has_files_and_addresses_of_its_own() -> None:
    config = EngineConfig(
        num_threads=7, host_cache_gb=1.0, disk_cache_path="/cache", disk_cache_gb=1.0, decision_log="/logs/all.log",
        quotas=(TenantQuota("*", max_running=4),), max_queue_s=3.0,
    )  # fmt: skip
    second = engine_of_each(config, 1, num_replicas=3)
    assert (second.disk_cache_path, second.decision_log) == ("/cache/replica-1", "/logs/all-1.log")
    assert (second.num_threads, second.quotas, second.max_queue_s, second.role) == (2, (), 3.0, "both")
    assert address_of_each("tcp://*:5557", 2) == "tcp://*:5559"
    assert address_of_each("tcp://127.0.0.1:*", 2) == "tcp://127.0.0.1:*"
    assert address_of_each("ipc:///run/events", 2) == "ipc:///run/events-2"
    shared = replace(config, decision_log=None, remote_cache="shm:x", remote_cache_gb=1.0)
    roles = [engine_of_each(shared, number, num_replicas=3, num_prefill=1).role for number in range(3)]
    assert roles == ["prefill", "decode", "decode"]


async def test_a_request_waits_for_a_place_no_longer_than_it_may(model_folder: Path, tokenizer: Tokenizer) -> None:
    config = EngineConfig(max_running=NUM_ROWS, max_queue_s=0.3)
    async with aclosing(running(model_folder, tokenizer, router_config=config)) as servers:
        server = await anext(servers)
        (await server.admin.post("/pause", json={})).raise_for_status()
        asks = [Ask(server, f"prompt {number}") for number in range(NUM_PLACES)]
        await server.until(lambda: sum(placed(server)) == NUM_PLACES)
        refused = await server.post("/v1/completions", {"prompt": "it waits"})
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_timeout"
        assert dispatcher_of(server).num_waiting == 0
        while True:
            late = Ask(server, "it gets a place in time")
            await server.until(lambda late=late: late.task.done() or dispatcher_of(server).num_waiting == 1)
            if not late.task.done():  # otherwise this process stood still for too long
                asks.pop().task.cancel()
                await server.until(lambda: dispatcher_of(server).num_waiting == 0)
                await asyncio.sleep(0)
                if sum(placed(server)) == NUM_PLACES:
                    break
                asks.append(Ask(server, "it takes the place again"))
                await server.until(lambda: sum(placed(server)) == NUM_PLACES)
        await asyncio.sleep(0.4)  # it has its place, and its engine decides
        assert not late.task.done()
        (await server.admin.post("/resume", json={})).raise_for_status()
        for ask in (*asks, late):
            await ask.check()


async def test_weights_of_tenants_hold_over_all_replicas(model_folder: Path, tokenizer: Tokenizer) -> None:
    weights = (("first", 3.0), ("second", 1.0))
    config = EngineConfig(max_running=NUM_ROWS, schedule_policy="fair", schedule_weights=weights)
    async with aclosing(running(model_folder, tokenizer, router_config=config)) as servers:
        server = await anext(servers)
        close_gates(server)
        before = [Ask(server, f"prompt {number}", max_tokens=2) for number in range(NUM_PLACES)]
        await server.until(lambda: sum(placed(server)) == NUM_PLACES)
        asks = {
            name: [Ask(server, f"of {name} {number}", max_tokens=2, cache_salt=name) for number in range(NUM_PLACES)]
            for name, _ in weights
        }
        await server.until(lambda: dispatcher_of(server).num_waiting == 2 * NUM_PLACES)
        for one in server.replicas:
            one.gate.allow(3)  # those of before end, and no further ones
        await server.until(lambda: dispatcher_of(server).num_waiting == NUM_PLACES)
        entries = dispatcher_of(server)._entries.values()  # pyright: ignore[reportPrivateUsage]
        placed_of = [sum(one.tenant == name and one.ticket is not None for one in entries) for name, _ in weights]
        assert sum(placed_of) == NUM_PLACES
        assert placed_of[0] == pytest.approx(0.75 * NUM_PLACES, abs=2)
        open_gates(server)
        for ask in (*before, *asks["first"], *asks["second"]):
            await ask.check()


async def test_a_replica_is_drained_into_others(server: MemoryServer) -> None:
    close_gates(server)
    asks = [Ask(server, f"prompt {number}", max_tokens=60) for number in range(9)]
    await server.until(lambda: placed(server) == [3, 3, 3])
    drained = await server.admin.post("/drain", json={"replica": 1, "wait_s": 20})
    assert drained.status_code == 200, drained.text
    assert drained.json() == {"is_draining": True, "num_live": 0}
    await server.until(lambda: sum(placed(server)) == 9)
    asks += [Ask(server, f"further prompt {number}") for number in range(5)]
    await server.until(lambda: sum(placed(server)) == 14)
    assert placed(server)[1] == 0
    server.kill(1)  # the next process of it gets nothing either
    await server.until(lambda: dispatcher_of(server).replicas[1].is_joined)
    ready = (await server.client.get("/ready")).json()
    assert [one["is_draining"] for one in ready["replicas"]] == [False, True, False]
    (await server.admin.post("/drain", json={"replica": 0})).raise_for_status()
    last = await server.admin.post("/drain", json={"replica": 2})
    assert (last.status_code, last.json()["error"]["code"]) == (503, "last_replica")
    unknown = await server.admin.post("/drain", json={"replica": 3})
    assert unknown.status_code == 400
    assert "the replicas 0 to 2, but got 3" in unknown.json()["error"]["message"]
    await server.until(lambda: placed(server)[2] == NUM_ROWS and dispatcher_of(server).num_waiting == 14 - NUM_ROWS)
    for number in (0, 1):
        back = await server.admin.post("/drain", json={"replica": number, "is_draining": False})
        assert back.json()["is_draining"] is False
    await server.until(lambda: dispatcher_of(server).num_waiting == 0)
    open_gates(server)
    for ask in asks:
        await ask.check()
    assert server.service.live.incidents.num_lost == 0


async def test_a_prefix_that_an_adapter_has_computed_is_found_again(
    model_folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    write_echo_adapter(tmp_path / "one", 1000)
    adapters = ServedAdapters(folders=[tmp_path])
    async with aclosing(running(model_folder, tokenizer, adapters=adapters)) as servers:
        server = await anext(servers)
        loading = {"lora_name": "one", "lora_path": str(tmp_path / "one")}
        (await server.admin.post("/v1/load_lora_adapter", json=loading)).raise_for_status()
        await server.until(lambda: bool(server.service.status.adapter_versions))
        undo = await drain_favourite(server)
        num_blocks = dispatcher_of(server).num_cached_blocks
        text = "a conversation with an adapter: " + "word " * 12
        first = await server.client.post("/v1/completions", json={"model": "one", "prompt": text, "max_tokens": 10})
        assert first.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        await server.until(lambda: dispatcher_of(server).num_cached_blocks > num_blocks)
        await undo()
        second = await server.client.post("/v1/completions", json={"model": "one", "prompt": text, "max_tokens": 10})
        assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        other = await server.client.post("/v1/completions", json={"model": "echo", "prompt": text, "max_tokens": 10})
        assert other.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_prefix_of_the_model_is_found_for_an_adapter_with_an_activation(
    model_folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    text = "a conversation with the model: " + "word " * 12
    whole = f"{text} check this"
    write_echo_adapter(tmp_path / "one", 1000, tokenizer.encode(whole)[-2:].tolist())
    adapters = ServedAdapters(folders=[tmp_path])
    async with aclosing(running(model_folder, tokenizer, adapters=adapters)) as servers:
        server = await anext(servers)
        loading = {"lora_name": "one", "lora_path": str(tmp_path / "one")}
        (await server.admin.post("/v1/load_lora_adapter", json=loading)).raise_for_status()
        await server.until(lambda: bool(server.service.status.adapter_versions))
        undo = await drain_favourite(server)
        num_blocks = dispatcher_of(server).num_cached_blocks
        await server.client.post("/v1/completions", json={"model": "echo", "prompt": text, "max_tokens": 2})
        await server.until(lambda: dispatcher_of(server).num_cached_blocks > num_blocks)
        await undo()
        second = await server.client.post("/v1/completions", json={"model": "one", "prompt": whole, "max_tokens": 2})
        assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
