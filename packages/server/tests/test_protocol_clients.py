"""The clients of Anthropic and Ollama, and LiteLLM, over real sockets: whole, streamed, with tools, and errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, TypeVar

import jsonschema
import pytest

from memory_server import MemoryServer
from scripted import Script, listening, scripted_server

pytestmark = pytest.mark.anyio

T = TypeVar("T")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
ANTHROPIC_TOOL: Any = {"name": "weather", "description": "The weather", "input_schema": SCHEMA}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": SCHEMA}}
USER: Any = {"role": "user", "content": "Is it raining in Oslo?"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THOUGHT = f"<think>\nLet me look.\n</think>\n\nOne moment.\n{CALL}"


@pytest.fixture
async def server(tools_folder: Path, script: Script) -> AsyncGenerator[MemoryServer]:
    async with scripted_server(tools_folder, script) as server:
        yield server


@pytest.fixture
async def url(server: MemoryServer) -> AsyncGenerator[str]:
    async with listening(server) as url:
        yield url


async def in_thread(call: Callable[[], T]) -> T:
    """Run what blocks, while the server goes on in the loop."""
    return await asyncio.to_thread(call)


async def test_anthropic(url: str, script: Script) -> None:
    anthropic = pytest.importorskip("anthropic")
    script.answer = THOUGHT
    said: dict[str, Any] = {"model": "echo", "max_tokens": 300, "messages": [USER], "tools": [ANTHROPIC_TOOL]}
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        whole = await client.messages.create(**said)
        assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
        assert (whole.stop_reason, whole.content[2].input) == ("tool_use", {"city": "Oslo"})
        async with client.messages.stream(**said) as stream:
            text = "".join([text async for text in stream.text_stream])
            found = await stream.get_final_message()
        assert text == "One moment."
        assert found.content[2].id != whole.content[2].id
        shown = [{**block.model_dump(exclude_none=True), "id": None} for block in found.content]
        assert shown == [{**block.model_dump(exclude_none=True), "id": None} for block in whole.content]
        assert found.stop_reason == "tool_use"
        prompt = found.usage.input_tokens + found.usage.cache_read_input_tokens
        assert prompt == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
        counted = await client.messages.count_tokens(model="echo", messages=[USER], tools=[ANTHROPIC_TOOL])
        assert counted.input_tokens == prompt
        # The client sends its answer back, with a result.
        script.answer = "It rains."
        result = {"type": "tool_result", "tool_use_id": found.content[2].id, "content": "rain"}
        history = [USER, found.to_param(), {"role": "user", "content": [result]}]
        last = await client.messages.create(**{**said, "messages": history})
        assert last.content[0].text == "It rains."
        assert "<think>\nLet me look.\n</think>\n\nOne moment.<tool_call>" in script.prompts[-1]
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.messages.create(**said, extra_body={"temperature": 9.0})
        assert refused.value.body["error"]["type"] == "invalid_request_error"
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**{**said, "model": "claude"})
        (model,) = [model async for model in client.models.list(limit=5)]
        assert (model.id, model.type, model.max_tokens) == ("echo", "model", 1600)
        assert model == await client.models.retrieve("echo")
        assert [model async for model in client.models.list(after_id="echo")] == []
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await client.models.retrieve("claude")
        assert unknown.value.body["error"]["type"] == "not_found_error"
        with pytest.raises(anthropic.BadRequestError, match="limit"):
            await client.models.list(limit=0)


async def test_anthropic_in_step_with_its_thread(url: str, script: Script) -> None:
    anthropic = pytest.importorskip("anthropic")
    script.answer = "one two three"

    def use() -> None:
        with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
            said: dict[str, Any] = {"model": "echo", "max_tokens": 50, "messages": [USER], "stop_sequences": ["three"]}
            found = client.messages.create(**said)
            assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", "three")
            with client.messages.stream(**said) as stream:
                assert "".join(stream.text_stream) == "one two"
                assert stream.get_final_message().stop_sequence == "three"
            kinds = [one.type for one in client.messages.create(**said, stream=True)]
            assert kinds[0] == "message_start"
            assert kinds[-2:] == ["message_delta", "message_stop"]
            # Structured output, by the field that the client makes of a schema.
            form = {"format": {"type": "json_schema", "schema": SCHEMA}}
            message = client.messages.create(model="echo", max_tokens=100, messages=[USER], output_config=form)
            jsonschema.validate(json.loads(message.content[0].text), SCHEMA)

    await in_thread(use)


async def test_the_tool_runner_of_anthropic(url: str, server: MemoryServer, script: Script) -> None:
    anthropic = pytest.importorskip("anthropic")
    asked: list[str] = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Return the weather.

        Args:
            city: name.
        """
        asked.append(city)
        script.answer = "It rains."
        return "rain"

    script.answer = THOUGHT

    def use() -> None:
        with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
            # More than the model's window, as agents ask for.
            runner = client.beta.messages.tool_runner(model="echo", max_tokens=20_000, messages=[USER], tools=[weather])
            replies = list(runner)
            assert [reply.stop_reason for reply in replies] == ["tool_use", "end_turn"]
            assert replies[-1].content[0].text == "It rains."
            with pytest.raises(anthropic.BadRequestError) as refused:
                client.messages.create(
                    model="echo", max_tokens=20_000, messages=[{"role": "user", "content": "x" * 1600}]
                )
            assert refused.value.body["error"]["message"].startswith("prompt is too long: ")

    await in_thread(use)
    assert asked == ["Oslo"]
    assert "<|start|>tool\nrain<|end|>" in script.prompts[-1]


async def test_ollama(url: str, script: Script) -> None:
    ollama = pytest.importorskip("ollama")
    script.answer = THOUGHT
    client = ollama.AsyncClient(host=url)
    try:
        whole = await client.chat(model="echo:latest", messages=[USER], tools=[TOOL])
        assert (whole.message.thinking, whole.message.content) == ("Let me look.", "One moment.")
        assert whole.message.tool_calls[0].function.arguments == {"city": "Oslo"}
        assert whole.done_reason == "stop"
        parts = [part async for part in await client.chat(model="echo", messages=[USER], tools=[TOOL], stream=True)]
        assert "".join(part.message.content or "" for part in parts) == "One moment."
        assert "".join(part.message.thinking or "" for part in parts) == "Let me look."
        (call,) = [call for part in parts for call in part.message.tool_calls or ()]
        assert call == whole.message.tool_calls[0]
        assert parts[-1].prompt_eval_count == whole.prompt_eval_count
        # The client sends its answer back, with a result.
        script.answer = "It rains."
        history = [USER, whole.message, {"role": "tool", "tool_name": "weather", "content": "rain"}]
        assert (await client.chat(model="echo", messages=history)).message.content == "It rains."
        assert "<|start|>tool\nrain<|end|>" in script.prompts[-1]
        with pytest.raises(ollama.ResponseError) as refused:
            await client.chat(model="llama", messages=[USER])
        assert refused.value.status_code == 404
    finally:
        await client.close()


async def test_ollama_in_step_with_its_thread(url: str, script: Script) -> None:
    ollama = pytest.importorskip("ollama")

    def weather(city: str) -> str:
        """Return the weather.

        Args:
            city: name.
        """
        return city

    def use() -> None:
        with ollama.Client(host=url) as client:
            assert client.generate(model="echo", prompt="Hi").response == "Hello there."
            parts = list(client.generate(model="echo", prompt="Hi", stream=True, options={"num_predict": 5}))
            assert "".join(part.response for part in parts) == "Hello"
            assert parts[-1].done_reason == "length"
            assert parts[-1].total_duration >= parts[-1].prompt_eval_duration > 0
            found = client.chat(model="echo", messages=[USER], format=SCHEMA, options=ollama.Options(temperature=0))
            jsonschema.validate(json.loads(found.message.content), SCHEMA)
            script.answer = CALL
            found = client.chat(model="echo", messages=[USER], tools=[weather])  # a function, described by the client
            assert found.message.tool_calls[0].function.name == "weather"
            assert client.list().models[0].model == "echo:latest"
            assert client.ps().models[0].context_length == 1600
            assert "tools" in client.show("echo").capabilities
            vectors = client.embed(model="echo", input=["one", "two"]).embeddings
            assert len(vectors) == 2
            assert list(client.embed(model="echo", input="two").embeddings[0]) == list(vectors[1])
            assert len(client.embeddings(model="echo", prompt="one").embedding) == len(vectors[0])

    await in_thread(use)


@pytest.mark.filterwarnings("ignore")  # those of LiteLLM and its dependencies
@pytest.mark.parametrize(("model", "path"), [("openai/echo", "/v1"), ("anthropic/echo", ""), ("ollama_chat/echo", "")])
async def test_litellm(url: str, script: Script, model: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise it asks the internet for prices
    litellm = pytest.importorskip("litellm")
    said: dict[str, Any] = {"model": model, "api_base": url + path, "api_key": "none", "num_retries": 0}
    said |= {"messages": [USER], "max_tokens": 200}

    def use() -> None:
        found = litellm.completion(**said)
        assert found.choices[0].message.content == "Hello there."
        assert found.usage.completion_tokens == len("Hello there.") + 1
        chunks = list(litellm.completion(**said, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello there."
        script.answer = CALL
        found = litellm.completion(**said, tools=[TOOL])
        (call,) = found.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
        assert found.choices[0].finish_reason == "tool_calls"
        chunks = list(litellm.completion(**said, tools=[TOOL], stream=True))
        built = litellm.stream_chunk_builder(chunks)
        (call,) = built.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
        script.answer = f"{CALL}\n{CALL.replace('Oslo', 'Rome')}"
        chunks = list(litellm.completion(**said, tools=[TOOL], stream=True))
        calls = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
        assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Oslo", "Rome"]
        script.answer = CALL
        with pytest.raises(litellm.NotFoundError):
            litellm.completion(**{**said, "model": model.replace("echo", "other")})

    await in_thread(use)
