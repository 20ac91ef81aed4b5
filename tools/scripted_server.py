"""A real server on a real socket, whose model writes what a function chooses: for checks of whole loops of clients."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from pagewood.engine.text import Tokenizer
from pagewood.server.http.http_server import http_server
from pagewood.server.http.limits import HttpLimits
from pagewood.server.http.listening import bind

SUPPORT = Path(__file__).resolve().parent.parent / "packages" / "server" / "tests" / "support"
sys.path.append(str(SUPPORT))
from echo_folder import TOOLS_TEMPLATE, write_echo_folder  # noqa: E402
from memory_server import MemoryServer  # noqa: E402


@asynccontextmanager
async def scripted_server(
    folder: Path, answer: Callable[[str], str], *, model: str = "echo", max_length: int = 300_000
) -> AsyncGenerator[str]:
    """Serve a model in `folder`, which is written first; yield the server's URL.

    Args:
        folder: is there.
        answer: returns what the model writes behind a prompt.
        model: its name.
        max_length: longest prompt plus answer, in tokens; a token is a byte.
    """
    write_echo_folder(folder, chat_template=TOOLS_TEMPLATE, template="hermes")
    server = MemoryServer(
        folder,
        Tokenizer.from_folder(folder),
        limit=16,
        script=answer,
        grammars=True,
        max_length=max_length,
        num_pages=40_000,
        limits=HttpLimits(),
        host="127.0.0.1",
        model_name=model,
    )
    await server.start()
    with bind("127.0.0.1", 0) as socket:
        http = http_server(server.frontend.site(), stop_grace_s=5)
        serving = asyncio.create_task(http.serve(sockets=[socket]))
        try:
            yield f"http://127.0.0.1:{socket.getsockname()[1]}"
        finally:
            http.should_exit = True
            await serving
            await server.stop()


def call(name: str, arguments: dict[str, str]) -> str:
    """Return a call as the model writes it."""
    return f"\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def begun(prompt: str) -> str:
    """Return what ends the reasoning that a prompt has begun, if it has."""
    return "</think>" if prompt.endswith("<think>\n") else ""
