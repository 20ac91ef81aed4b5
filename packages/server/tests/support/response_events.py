"""The events of a response, judged by the types of OpenAI's client and put together as a client does."""

from __future__ import annotations

import json
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

_EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
ENDS = {"response.completed", "response.incomplete", "response.failed"}


def checked(body: dict[str, Any]) -> dict[str, Any]:
    """Return a response after it has passed OpenAI's types, and has every field that they know."""
    Response.model_validate(body)
    assert Response.model_fields.keys() <= body.keys(), Response.model_fields.keys() - body.keys()
    return body


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream after all that can be said of any stream was checked."""
    *blocks, nothing = text.split("\n\n")
    assert nothing == ""
    events: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        valid: Any = _EVENT.validate_python(event)
        assert isinstance(valid, BaseModel)
        # An unknown field would be an event that OpenAI does not have; a call's name is in some versions of the types.
        assert set(valid.model_extra or ()) <= {"name"}
        events.append(event)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event["type"] in ENDS for event in events] == [False] * (len(events) - 1) + [True]
    for event in events:
        if "response" in event:
            checked(event["response"])
            assert event["response"]["id"] == events[0]["response"]["id"]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    return events


def assembled(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the output that the deltas make, after it was compared with every `done` event."""
    items: list[Any] = []
    done: list[bool] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            assert event["item"]["status"] == "in_progress"
            items.append(event["item"])
            done.append(False)
            continue
        if "output_index" not in event:
            continue
        index = event["output_index"]
        item = items[index]
        assert not done[index], "nothing comes after the end of an item"
        if kind == "output_item.done":
            done[index] = True
            names = ["status", "encrypted_content"]
            if item["type"] == "tool_search_call":
                names.append("arguments")  # it has no deltas
            final = {name: event["item"][name] for name in names if name in event["item"]}
            assert event["item"] == {**item, **final}
            items[index] = event["item"]
            continue
        assert event["item_id"] == item["id"]
        if kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == item["arguments"]
        elif kind == "custom_tool_call_input.delta":
            assert event["delta"]
            item["input"] += event["delta"]
        elif kind == "custom_tool_call_input.done":
            assert event["input"] == item["input"]
        elif kind == "content_part.added":
            assert event["content_index"] == len(item["content"])
            assert event["part"]["text"] == ""
            item["content"].append(event["part"])
        else:
            part = item["content"][event["content_index"]]
            match kind:
                case "output_text.delta":
                    part["text"] += event["delta"]
                    part["logprobs"] += event["logprobs"]
                case "output_text.done":
                    assert (event["text"], event["logprobs"]) == (part["text"], part["logprobs"])
                case "reasoning_text.delta":
                    part["text"] += event["delta"]
                case "reasoning_text.done":
                    assert event["text"] == part["text"]
                case "content_part.done":
                    assert event["part"] == part
                case _:
                    raise AssertionError(kind)
    last = events[-1]
    if last["type"] != "response.failed":
        assert all(done)
        assert last["response"]["output"] == items
        assert last["type"] == "response." + last["response"]["status"]
    return items


def without_ids(value: Any) -> Any:
    """Return JSON without what differs between two answers to one request."""
    if isinstance(value, list):
        return [without_ids(one) for one in value]  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(value, dict):
        return value
    changing = {"id", "call_id", "created_at", "completed_at", "encrypted_content"}
    return {key: without_ids(one) for key, one in value.items() if key not in changing}  # pyright: ignore
