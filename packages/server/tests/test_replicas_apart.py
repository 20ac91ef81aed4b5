"""One engine that computes prompts and two that decode, behind one server: what happens in each state of a request."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from memory_server import NUM_ROWS, MemoryServer
from pagewood.engine.text import Tokenizer
from pagewood.schedpolicy.routing.replicas import Role
from pagewood.server.replicas.fleet_status import FleetStatus
from pagewood.server.requests.status import EngineState
from replica_server import Ask, close_gates, dispatcher_of, placed, running

pytestmark = pytest.mark.anyio

LONG = "a prompt that is longer than what an engine that decodes computes itself, number "


@pytest.fixture
async def server(model_folder: Path, tokenizer: Tokenizer) -> AsyncGenerator[MemoryServer]:
    async for server in running(model_folder, tokenizer, num_prefill=1):
        yield server


def num_prompts(server: MemoryServer) -> int:
    """Return how many prompts the first replica has now."""
    return placed(server)[0]


def num_computed(server: MemoryServer, replica: int) -> int:
    """Return how many prompt tokens a replica has computed."""
    status = server.service.status
    assert isinstance(status, FleetStatus)
    measured = status.replicas[replica].measurement
    return 0 if measured is None else measured.num_prefill_tokens


async def test_prompts_are_computed_apart_and_answers_are_those_of_one_engine(server: MemoryServer) -> None:
    assert [one.role for one in dispatcher_of(server).replicas] == [Role.PREFILL, Role.DECODE, Role.DECODE]
    asks = [Ask(server, f"{LONG}{number}") for number in range(12)]
    for ask in asks:
        body = await ask.check()
        assert body["usage"]["completion_tokens"] > 1
    await server.until_idle()
    await server.until(lambda: num_computed(server, 0) > 12 * len(LONG) // 16)
    ready = (await server.client.get("/ready")).json()
    assert [one["role"] for one in ready["replicas"]] == ["prefill", "decode", "decode"]


async def test_a_request_reaches_the_replica_that_decodes_when_its_prompt_is_computed(server: MemoryServer) -> None:
    server.replicas[0].gate.close()
    asks = [Ask(server, f"{LONG}{number}") for number in range(4)]
    await server.until(lambda: num_prompts(server) == 4)
    assert sum(placed(server)[1:]) == 4  # the places are taken already
    await asyncio.sleep(0.05)
    assert server.service.status.counters["num_running"] <= 4  # those of the first replica
    assert not any(ask.task.done() for ask in asks)
    short = Ask(server, "short")
    await short.check()  # it needs no other engine
    server.replicas[0].gate.open()
    for ask in asks:
        await ask.check()


async def test_a_lost_engine_for_prompts_is_a_cache_miss(server: MemoryServer) -> None:
    server.replicas[0].gate.close()
    asks = [Ask(server, f"{LONG}{number}") for number in range(6)]
    await server.until(lambda: num_prompts(server) == 6)
    server.kill(0, is_restarted=False)
    for ask in asks:
        await ask.check()
    late = Ask(server, f"{LONG}late")
    await late.check()
    assert server.service.status.state is EngineState.READY
    assert server.service.live.incidents.num_retried == 0
    server.restart(0)
    await server.until(lambda: dispatcher_of(server).replicas[0].is_joined)


async def test_a_request_that_its_lost_replica_did_not_have_is_not_suspected(server: MemoryServer) -> None:
    server.replicas[0].gate.close()
    asks = [Ask(server, f"{LONG}{number}") for number in range(6)]
    await server.until(lambda: placed(server) == [6, 3, 3])
    server.kill(1, is_restarted=False)
    await server.until(lambda: placed(server) == [6, 0, 6])
    assert server.service.live.incidents.num_retried == 0
    server.restart(1)
    server.replicas[0].gate.open()
    for ask in asks:
        await ask.check()


async def test_cancelled_prompts_are_stopped(server: MemoryServer) -> None:
    server.replicas[0].gate.close()
    asks = [Ask(server, f"{LONG}{number}") for number in range(4)]
    await server.until(lambda: num_prompts(server) == 4)
    await server.until(lambda: server.replicas[0].gate.is_held)  # it reads no commands now
    num_queued = server.num_queued_commands
    for ask in asks[1:]:
        ask.task.cancel()
    await server.until(lambda: placed(server) == [1, 0, 1] or placed(server) == [1, 1, 0])
    assert server.num_queued_commands == num_queued + 3  # the engine will stop them
    server.replicas[0].gate.open()
    await asks[0].check()


async def test_an_urgent_request_takes_the_place_of_one_whose_prompt_is_computed(server: MemoryServer) -> None:
    close_gates(server)
    asks = [Ask(server, f"short {number}") for number in range(NUM_ROWS)]
    await server.until(lambda: sum(placed(server)) == NUM_ROWS)
    asks += [Ask(server, f"{LONG}{number}") for number in range(NUM_ROWS)]
    await server.until(lambda: sum(placed(server)[1:]) == 2 * NUM_ROWS and num_prompts(server) == NUM_ROWS)
    urgent = Ask(server, "urgent", priority=5)
    await server.until(lambda: dispatcher_of(server).num_waiting == 1 and num_prompts(server) == NUM_ROWS - 1)
    for one in server.replicas[1:]:
        one.gate.open()
    await urgent.check()
    assert server.service.live.incidents.num_retried == 0  # nothing had to be sent again
    server.replicas[0].gate.open()
    for ask in asks:
        await ask.check()


async def test_a_prompt_whose_probabilities_are_wanted_is_computed_where_it_is_answered(server: MemoryServer) -> None:
    server.replicas[0].gate.close()
    asked = {"prompt": f"{LONG}1", "max_tokens": 3, "prompt_logprobs": 1}
    response = await server.post("/v1/completions", asked)
    assert response.status_code == 200, response.text
    embedded = await server.post("/v1/embeddings", {"input": f"{LONG}2"})
    assert embedded.status_code == 200, embedded.text
    assert num_prompts(server) == 0
    server.replicas[0].gate.open()


async def test_a_paused_request_stays_so_when_its_prompt_is_computed(server: MemoryServer) -> None:
    server.replicas[0].gate.close()
    body = {"text": f"{LONG}1", "rid": "mine", "sampling_params": {"max_new_tokens": 5}}
    task = asyncio.create_task(server.client.post("/generate", json=body))
    await server.until(lambda: num_prompts(server) == 1)
    (await server.admin.post("/pause", json={"rid": "mine"})).raise_for_status()
    server.replicas[0].gate.open()
    await server.until(lambda: num_prompts(server) == 0 and server.service.status.counters["num_held"] == 1)
    assert not task.done()
    (await server.admin.post("/resume", json={"rid": "mine"})).raise_for_status()
    assert (await task).json()["meta_info"]["completion_tokens"] == 5


@pytest.mark.parametrize("seed", range(3))
async def test_no_request_is_lost_whatever_dies(server: MemoryServer, seed: int) -> None:
    """Random deaths, cancellations and urgent requests in every state: all answers are right, and no place is lost."""
    rng = random.Random(seed)
    asks: list[Ask] = []
    num_deaths = 0
    for number in range(90):
        priority = rng.choice((0, 0, 0, 3))
        prompt = f"{LONG if rng.random() < 0.7 else ''}{seed} {number}"
        asks.append(Ask(server, prompt, max_tokens=rng.choice((2, 30)), priority=priority))
        if rng.random() < 0.15:
            asks.pop(rng.randrange(len(asks))).task.cancel()
        may_die = num_deaths < 3 and all(one.is_joined for one in dispatcher_of(server).replicas)
        if rng.random() < 0.15 and may_die:
            server.kill(rng.randrange(3))  # new requests need one that answers
            num_deaths += 1
        if rng.random() < 0.5:
            await asyncio.sleep(rng.random() * 0.02)
    for ask in asks:
        await ask.check()
    assert num_deaths == 3  # no more than `max_retries`, because one request may see all of them
    assert server.service.live.incidents.num_lost == 0
