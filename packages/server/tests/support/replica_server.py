"""Several engines behind one server in memory, and requests to it whose answers are known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from memory_server import NUM_ROWS, MemoryServer
from pagewood.engine.text import Tokenizer
from pagewood.server.replicas.dispatcher import Dispatcher

NUM = 3
NUM_PLACES = NUM * NUM_ROWS


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
