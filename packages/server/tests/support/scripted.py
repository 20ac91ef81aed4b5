"""An in-memory server whose model answers what a test has chosen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from memory_server import MemoryServer
from pagewood.engine.text import Tokenizer
from pagewood.server.http.errors import unavailable
from pagewood.server.http.http_server import http_server
from pagewood.server.http.listening import bind


class Script:
    """The answers of the model, and the prompts that it saw. A prompt without an answer of its own gets `answer`."""

    def __init__(self) -> None:
        self.answer = "Hello there."
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> str:
        if not self.prompts or self.prompts[-1] != prompt:
            self.prompts.append(prompt)
        return self.answer


@asynccontextmanager
async def scripted_server(
    folder: Path, script: Callable[[str], str] | None, **options: Any
) -> AsyncGenerator[MemoryServer]:
    """Run a server with the model in `folder`; in the end it must be idle. Without a script, answers are hashes."""
    options = {"limit": 64, "grammars": True, "max_length": 1600, **options}
    server = MemoryServer(folder, Tokenizer.from_folder(folder), script=script, **options)
    await server.start()
    try:
        yield server
        await server.until_idle()
    finally:
        await server.stop()


@asynccontextmanager
async def paced(server: MemoryServer, *, step_s: float = 0.025) -> AsyncGenerator[None]:
    """Let the engine begin a step every `step_s` at most."""

    async def pace() -> None:
        while True:
            server.gate.allow(1)
            await asyncio.sleep(step_s)

    pacing = asyncio.create_task(pace())
    try:
        yield
    finally:
        pacing.cancel()
        server.gate.open()


@asynccontextmanager
async def listening(server: MemoryServer) -> AsyncGenerator[str]:
    """Serve a server over a real socket; yield its URL."""
    socket = bind("127.0.0.1", 0)
    http = http_server(server.frontend.site(), stop_grace_s=5)
    serving = asyncio.create_task(http.serve(sockets=[socket]))
    await server.until(lambda: http.started)
    try:
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        http.should_exit = True  # not ours
        await serving
        socket.close()


async def interrupted(server: MemoryServer, path: str, body: dict[str, Any]) -> list[str]:
    """Return the lines of a stream whose engine dies after a few tokens, without those that are empty."""
    server.gate.allow(5)
    async with (
        listening(server) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
        client.stream("POST", path, json={"model": "echo", **body}) as response,
    ):
        assert response.status_code == 200
        lines = response.aiter_lines()
        found = [await anext(lines)]
        server.service.live.fail_all(unavailable("The engine process died.", code="engine_lost"))
        server.gate.open()
        found += [line async for line in lines]
    return [line for line in found if line]
