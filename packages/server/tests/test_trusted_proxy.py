"""Whose address a request has: that of its connection, or what a proxy says that the operator trusts."""

from __future__ import annotations

import asyncio
import logging

import httpx
import pytest

from memory_server import MemoryServer
from pagewood.server.http.http_server import http_server
from pagewood.server.http.listening import bind

pytestmark = pytest.mark.anyio

FORWARDED = {"X-Forwarded-For": "203.0.113.9", "X-Forwarded-Proto": "https"}


@pytest.mark.parametrize(
    ("trusted", "client"),
    [
        ((), "127.0.0.1"),
        (("10.0.0.0/8",), "127.0.0.1"),
        (("127.0.0.1",), "203.0.113.9"),
        (("127.0.0.0/8",), "203.0.113.9"),
    ],
)
async def test_a_header_names_the_client_only_from_a_trusted_proxy(
    server: MemoryServer,
    trusted: tuple[str, ...],
    client: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")  # a variable of uvicorn, which says nothing here
    caplog.set_level(logging.INFO, "pagewood.server.requests")
    socket = bind("127.0.0.1", 0)
    http = http_server(server.frontend.site(), stop_grace_s=5, trusted_proxies=trusted)
    serving = asyncio.create_task(http.serve(sockets=[socket]))
    await server.until(lambda: http.started)
    try:
        port = socket.getsockname()[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=FORWARDED, timeout=60) as seen:
            assert (await seen.get("/v1/models")).status_code == 200
            cross = await seen.post("/abort", json={"rid": "x"}, headers={"Origin": f"http://127.0.0.1:{port}"})
            # A trusted proxy that says https has a page of http for a foreign one.
            assert (cross.status_code == 403) == (client != "127.0.0.1")
    finally:
        http.should_exit = True  # not ours
        await serving
        socket.close()
    line = next(record.getMessage() for record in caplog.records if "/v1/models" in record.getMessage())
    assert f" client={client}:" in line
