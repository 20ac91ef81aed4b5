"""LangChain's client for OpenAI's API, unmodified: chat, stream, tools and structured output."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from echo_folder import TOOLS_TEMPLATE, write_echo_folder
from memory_server import MemoryServer
from pagewood.engine.text import Tokenizer

pytest.importorskip("langchain_openai")

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

pytestmark = pytest.mark.anyio


class Weather(BaseModel):
    """Get the weather of a city."""

    city: str


def script(prompt: str) -> str:
    """Answer as a model would: with a call if there are tools, with their result once there is one."""
    if "<|start|>tool\n" in prompt:
        return "It is " + prompt.rpartition("<|start|>tool\n")[2].partition("<|end|>")[0]
    if "as JSON" in prompt:
        return '{"city":"Oslo"}'
    if "<|start|>tools" in prompt:
        return '<tool_call>\n{"name": "Weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    return "Hello there"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[MemoryServer]:
    write_echo_folder(tmp_path, chat_template=TOOLS_TEMPLATE, template="hermes")
    async with MemoryServer(
        tmp_path, Tokenizer.from_folder(tmp_path), limit=64, script=script, grammars=True, max_length=1600
    ) as server:
        yield server
        await server.until_idle()


@pytest.fixture
async def model(server: MemoryServer) -> AsyncGenerator[Any]:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://memory")
    # Its types change from version to version.
    yield ChatOpenAI(
        model="echo",
        base_url="http://memory/v1",
        api_key="none",  # type: ignore[arg-type]
        max_retries=0,
        http_async_client=http,
    )
    await http.aclose()


async def test_chat(model: Any) -> None:
    answer = await model.ainvoke([("system", "Be kind."), ("user", "Hi")])
    assert answer.content == "Hello there"
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata["output_tokens"] == len("Hello there") + 1


async def test_stream(model: Any) -> None:
    whole: Any = None
    num_chunks = 0
    async for chunk in model.astream("Hi", stream_usage=True):
        whole = chunk if whole is None else whole + chunk
        num_chunks += 1
    assert num_chunks > len("Hello there")
    assert whole.content == "Hello there"
    assert whole.usage_metadata["output_tokens"] == len("Hello there") + 1


@pytest.mark.parametrize("stream", [False, True])
async def test_tools(model: Any, stream: bool) -> None:
    bound = model.bind_tools([Weather])
    question = HumanMessage("How is the weather in Oslo?")
    if stream:
        answer: Any = None
        async for chunk in bound.astream([question]):
            answer = chunk if answer is None else answer + chunk
    else:
        answer = await bound.ainvoke([question])
    [call] = answer.tool_calls
    assert (call["name"], call["args"]) == ("Weather", {"city": "Oslo"})
    history = [
        question,
        AIMessage("", tool_calls=[{"name": "Weather", "args": call["args"], "id": call["id"]}]),
        ToolMessage("sunny", tool_call_id=call["id"]),
    ]
    assert (await bound.ainvoke(history)).content == "It is sunny"


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
async def test_structured_output(model: Any, method: str) -> None:
    structured = model.with_structured_output(Weather, method=method)
    question = "Where? Answer as JSON." if method == "json_schema" else "Where?"
    assert await structured.ainvoke(question) == Weather(city="Oslo")
    assert json.loads(Weather(city="Oslo").model_dump_json()) == {"city": "Oslo"}
