"""OpenAI's client and its agents against `/v1/responses`, and the agents against chat completions."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from openai import AsyncOpenAI, NotFoundError, OpenAI
from pydantic import BaseModel

from echo_folder import TOOLS_TEMPLATE, write_echo_folder
from memory_server import MemoryServer
from pagewood.engine.text import Tokenizer

pytestmark = pytest.mark.anyio

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
REASONING = "<think>\nI must look.\n</think>\n\n"


class Trip(BaseModel):
    city: str
    days: int


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder whose templates know tools and reasoning."""
    folder = tmp_path_factory.mktemp("clients")
    write_echo_folder(folder, chat_template=TOOLS_TEMPLATE, template="hermes")
    return folder


def answer(prompt: str) -> str:
    """Return what the model says: a call if it has tools and no result yet, JSON if it is asked for, else a text."""
    if "<|start|>tool\n" in prompt:
        return "It rains in Oslo."
    if '"weather"' in prompt:
        return REASONING + CALL
    return '{"city": "Oslo", "days": 2}' if "JSON" in prompt else "Hello there."


@pytest.fixture
async def server(folder: Path) -> AsyncGenerator[MemoryServer]:
    tokenizer = Tokenizer.from_folder(folder)
    async with MemoryServer(folder, tokenizer, limit=64, script=answer, grammars=True, max_length=2000) as server:
        yield server
        await server.until_idle()


@pytest.fixture
async def client(server: MemoryServer) -> AsyncGenerator[AsyncOpenAI]:
    """OpenAI's client, connected to the server in memory."""
    # Any: some versions of the client declare the types of a fork of httpx, and all accept both.
    http: Any = httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://memory")
    async with AsyncOpenAI(base_url="http://memory/v1", api_key="none", max_retries=0, http_client=http) as client:
        yield client


class Bridge(httpx.BaseTransport):
    """Connects a client in another thread to the server, which lives in the loop of the test."""

    def __init__(self, server: MemoryServer) -> None:
        self._transport = httpx.ASGITransport(server.app)
        self._loop = asyncio.get_running_loop()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return asyncio.run_coroutine_threadsafe(self._send(request), self._loop).result(60)

    async def _send(self, request: httpx.Request) -> httpx.Response:
        asked = httpx.Request(request.method, request.url, headers=request.headers, content=request.read())
        response = await self._transport.handle_async_request(asked)
        return httpx.Response(response.status_code, headers=response.headers, content=await response.aread())


async def synchronous(server: MemoryServer, use: Callable[[OpenAI], None]) -> None:
    """Run `use` with OpenAI's synchronous client in a thread."""
    http: Any = httpx.Client(transport=Bridge(server))
    with OpenAI(base_url="http://memory/v1", api_key="none", max_retries=0, http_client=http) as client:
        await asyncio.to_thread(use, client)


async def test_create_and_continue(server: MemoryServer) -> None:
    def use(client: OpenAI) -> None:
        first = client.responses.create(model="echo", input="Hi", instructions="Be brief.")
        assert (first.output_text, first.status) == ("Hello there.", "completed")
        second = client.responses.create(model="echo", input="JSON", previous_response_id=first.id)
        assert second.output_text == '{"city": "Oslo", "days": 2}'
        assert client.responses.retrieve(second.id).output == second.output
        items = list(client.responses.input_items.list(second.id, limit=1, order="asc"))  # three pages
        assert [item.type for item in items] == ["message", "message", "message"]
        client.responses.delete(first.id)
        with pytest.raises(NotFoundError, match="not found"):
            client.responses.retrieve(first.id)

    await synchronous(server, use)


async def test_events(server: MemoryServer) -> None:
    def use(client: OpenAI) -> None:
        texts, last = "", ""
        for event in client.responses.create(model="echo", input="Hi", stream=True):
            if event.type == "response.output_text.delta":
                texts += event.delta
            last = event.type
        assert (texts, last) == ("Hello there.", "response.completed")

    await synchronous(server, use)


async def test_parse(server: MemoryServer, client: AsyncOpenAI) -> None:
    parsed = await client.responses.parse(model="echo", input="JSON please", text_format=Trip)
    assert parsed.output_parsed == Trip(city="Oslo", days=2)

    def use(client: OpenAI) -> None:
        parsed = client.responses.parse(model="echo", input="JSON please", text_format=Trip)
        assert parsed.output_parsed == Trip(city="Oslo", days=2)

    await synchronous(server, use)


async def test_stream_helper(client: AsyncOpenAI) -> None:
    """The helper puts the events together itself, and checks their order."""
    tool: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
    kinds: set[str] = set()
    async with client.responses.stream(model="echo", input="Hi", tools=[tool]) as stream:
        async for event in stream:
            kinds.add(event.type)
            if event.type == "response.function_call_arguments.delta":
                assert '{"city": "Oslo"}'.startswith(event.snapshot)
        response = await stream.get_final_response()
    assert {"response.reasoning_text.delta", "response.function_call_arguments.done"} <= kinds
    assert [item.type for item in response.output] == ["reasoning", "function_call"]
    async with client.responses.stream(model="echo", input="JSON", text_format=Trip) as stream:
        parsed = await stream.get_final_response()
    assert parsed.output_parsed == Trip(city="Oslo", days=2)


async def test_tool_loop(client: AsyncOpenAI) -> None:
    """The objects of an answer are sent back as they are."""
    tool: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
    given: list[Any] = [{"role": "user", "content": "Hi"}]
    first = await client.responses.create(model="echo", input=given, tools=[tool], store=False)
    given += first.output
    for item in first.output:
        if item.type == "function_call":
            given.append({"type": "function_call_output", "call_id": item.call_id, "output": "wet"})
    second = await client.responses.create(model="echo", input=given, tools=[tool], store=False)
    assert second.output_text == "It rains in Oslo."


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("protocol", ["responses", "chat"])
async def test_agents(client: AsyncOpenAI, protocol: Literal["responses", "chat"], is_stream: bool) -> None:
    """An agent of OpenAI's library calls its function, and answers."""
    os.environ.setdefault("OPENAI_AGENTS_DISABLE_TRACING", "1")
    agents: Any = pytest.importorskip("agents")
    cities: list[str] = []

    def weather(city: str) -> str:
        """Say what the weather is."""
        cities.append(city)
        return "wet"

    kind = agents.OpenAIResponsesModel if protocol == "responses" else agents.OpenAIChatCompletionsModel
    model = kind(model="echo", openai_client=client)
    agent = agents.Agent(name="A", instructions="Help.", model=model, tools=[agents.function_tool(weather)])
    config = agents.RunConfig(tracing_disabled=True)
    if is_stream:
        result = agents.Runner.run_streamed(agent, "Is it raining?", run_config=config)
        kinds = [event.type async for event in result.stream_events()]
        assert "raw_response_event" in kinds
    else:
        result = await agents.Runner.run(agent, "Is it raining?", run_config=config)
    assert result.final_output == "It rains in Oslo."
    assert cities == ["Oslo"]
