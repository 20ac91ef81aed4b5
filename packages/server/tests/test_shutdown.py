"""The end of a server: no new requests, running ones may end, the rest get an error; and who hears it first."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest

from memory_server import MemoryServer
from pagewood.server.http.http_server import http_server
from pagewood.server.http.listening import bind
from pagewood.server.observe.incidents import Incidents
from pagewood.server.shutdown import Shutdown

pytestmark = pytest.mark.anyio

LONG = {"model": "echo", "prompt": "Hi", "max_tokens": 100, "ignore_eos": True, "stream": True}


@dataclass(frozen=True, slots=True)
class Ending:
    """A server that listens and can be ended."""

    shutdown: Shutdown
    incidents: Incidents
    client: httpx.AsyncClient
    serving: asyncio.Task[None]


@asynccontextmanager
async def ending(server: MemoryServer, *, drain_s: float) -> AsyncGenerator[Ending]:
    """Serve over a socket until the shutdown has ended uvicorn."""
    listening = bind("127.0.0.1", 0)
    http = http_server(server.frontend.site(), stop_grace_s=2)
    incidents = Incidents()
    shutdown = Shutdown(server.service.live, drain_s=drain_s, incidents=incidents)
    draining = asyncio.create_task(shutdown.run(http))
    serving = asyncio.create_task(http.serve(sockets=[listening]))
    await server.until(lambda: http.started)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        yield Ending(shutdown, incidents, client, serving)
    await asyncio.wait_for(serving, 60)
    await draining
    listening.close()


async def test_running_requests_end_and_new_ones_are_refused(server: MemoryServer) -> None:
    server.gate.allow(5)
    async with (
        ending(server, drain_s=30) as end,
        end.client.stream("POST", "/v1/completions", json=LONG) as response,
    ):
        lines = response.aiter_lines()
        await anext(lines)
        assert (await end.client.get("/ready")).status_code == 200
        end.shutdown.begin()
        ready = await end.client.get("/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "draining")
        assert (await end.client.get("/health")).status_code == 200
        assert (await end.client.get("/health/generate")).status_code == 503
        for path, body in (("/v1/completions", LONG), ("/tokenize", {"text": "a"})):
            refused = await end.client.post(path, json=body)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            assert "retry-after" in refused.headers
        assert not end.serving.done()
        server.gate.open()
        rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert len(rest) > 90
    assert (end.incidents.num_drained, end.incidents.num_cut_off) == (1, 0)


@pytest.mark.parametrize("at_once", [False, True])
async def test_what_does_not_end_in_time_gets_an_error(server: MemoryServer, at_once: bool) -> None:
    server.gate.allow(5)
    async with (
        ending(server, drain_s=600 if at_once else 0.3) as end,
        end.client.stream("POST", "/v1/completions", json=LONG) as response,
    ):
        lines = response.aiter_lines()
        await anext(lines)
        end.shutdown.begin(at_once=at_once)
        rest = [line async for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
    server.gate.open()
    assert (end.incidents.num_drained, end.incidents.num_cut_off) == (0, 1)
