"""Servers and model folders for the tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from functools import cache
from pathlib import Path

import httpx
import pytest

from echo_folder import TOOLS_TEMPLATE, write_echo_folder
from memory_server import MemoryServer
from pagewood.engine.text import Tokenizer
from scripted import Script


@pytest.fixture
def anyio_backend() -> str:
    """Async tests run on asyncio."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def certificates_are_read_once() -> Iterator[None]:
    """Let clients share what they know of certificates; reading them takes each client 20 ms, used or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx._transports.default.create_ssl_context", cache(httpx.create_ssl_context))
        yield


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    folder = tmp_path_factory.mktemp("echo")
    write_echo_folder(folder)
    return folder


@pytest.fixture(scope="session")
def tools_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder whose templates know tools and reasoning."""
    folder = tmp_path_factory.mktemp("tools")
    write_echo_folder(folder, chat_template=TOOLS_TEMPLATE, template="hermes")
    return folder


@pytest.fixture
def script() -> Script:
    """What the model of a scripted server answers."""
    return Script()


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    """The tokenizer of that folder: 256 bytes and two special tokens."""
    return Tokenizer.from_folder(model_folder)


@pytest.fixture
async def server(model_folder: Path, tokenizer: Tokenizer) -> AsyncGenerator[MemoryServer]:
    """A server that is ready; afterwards it must hold no request."""
    async with MemoryServer(model_folder, tokenizer, limit=64) as server:
        yield server
        await server.until_idle()
