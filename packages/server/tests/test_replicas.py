"""Three engines behind one server: affinity, priorities and quotas over all, deaths, and commands for all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memory_server import NUM_ROWS, MemoryServer
from pagewood.engine.api import EngineConfig, TenantQuota
from pagewood.engine.text import Tokenizer
from pagewood.server.config import ServeConfig
from pagewood.server.http.errors import unavailable
from pagewood.server.metrics.endpoint import MetricsEndpoint, text_of
from pagewood.server.replicas.dispatcher import Dispatcher
from pagewood.server.requests.status import EngineState

pytestmark = pytest.mark.anyio

NUM = 3
NUM_PLACES = NUM * NUM_ROWS
LOST = unavailable("The engine process died.", code="engine_lost")


async def running(folder: Path, tokenizer: Tokenizer, **options: Any) -> AsyncGenerator[MemoryServer]:
    """Yield a server that is ready; afterwards no stage of it may hold a request."""
    server = MemoryServer(folder, tokenizer, limit=200, num_replicas=NUM, max_retries=3, **options)
    await server.start()
    is_good = False
    try:
        yield server
        is_good = True
    finally:
        open_gates(server)
        if is_good:
            await server.until_idle()
            assert dispatcher_of(server).num_waiting == 0
            assert placed(server) == [0] * NUM
        await server.stop()


@pytest.fixture
async def server(model_folder: Path, tokenizer: Tokenizer) -> AsyncGenerator[MemoryServer]:
    async for server in running(model_folder, tokenizer):
        yield server


def dispatcher_of(server: MemoryServer) -> Dispatcher:
    assert server.dispatcher is not None
    return server.dispatcher


def close_gates(server: MemoryServer) -> None:
    for one in server.replicas:
        one.gate.close()


def open_gates(server: MemoryServer) -> None:
    for one in server.replicas:
        one.gate.open()


def placed(server: MemoryServer) -> list[int]:
    """Return how many requests each replica has."""
    return [dispatcher_of(server).num_requests(number) for number in range(NUM)]


class Ask:
    """A completion under way, with the text that it must have."""

    def __init__(self, server: MemoryServer, prompt: str, *, max_tokens: int = 20, **body: Any) -> None:
        sampled = {"temperature": 0.7, "seed": len(prompt)}
        self.expected = server.expected_text(prompt, max_tokens=max_tokens, temperature=0.7, seed=len(prompt))
        self.task = asyncio.create_task(
            server.post("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens, **sampled, **body})
        )

    async def check(self) -> dict[str, Any]:
        """Wait for the answer, compare it, and return it."""
        response = await self.task
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["text"] == self.expected
        return response.json()


async def test_answers_are_those_of_one_engine_and_all_engines_work(server: MemoryServer) -> None:
    close_gates(server)
    asks = [Ask(server, f"prompt {number}") for number in range(12)]
    await server.until(lambda: placed(server) == [4, 4, 4])
    open_gates(server)
    for ask in asks:
        await ask.check()


async def test_a_second_turn_goes_where_its_prefix_is(server: MemoryServer) -> None:
    for number in range(6):
        first = f"conversation {number}: " + "word " * 12
        num_blocks = dispatcher_of(server).num_cached_blocks
        assert (await Ask(server, first).check())["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        await server.until(lambda before=num_blocks: dispatcher_of(server).num_cached_blocks > before)
        second = await Ask(server, first + "and more").check()
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
    await server.until(lambda: dispatcher_of(server).num_waiting == NUM_PLACES + 2)
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
    ("field", "value"),
    [
        ("disk_cache_path", "/somewhere"),
        ("decision_log", "/somewhere"),
        ("max_queue_s", 3.0),
        ("refuse_late", True),
        ("device", "cuda"),
        ("num_threads", 1),
    ],
)
def test_what_stands_against_replicas_is_refused_by_name(model_folder: Path, field: str, value: object) -> None:
    options: dict[str, Any] = {
        field: value,
        **({"host_cache_gb": 1.0, "disk_cache_gb": 1.0} if "disk" in field else {}),
    }
    engine = replace(EngineConfig(num_threads=8), **options)
    name = "replicas" if field == "num_threads" else field
    with pytest.raises(ValueError, match=f"^{name} must .*replicas|^{name} must leave each engine a thread"):
        ServeConfig(engine=engine, served_model_name="m", model_folder=model_folder, replicas=2)
