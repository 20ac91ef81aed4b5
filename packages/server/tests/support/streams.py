"""The pieces of a stream, compared with the document of the server."""

from __future__ import annotations

import json
from typing import Any

import jsonschema

STREAMS = ("text/event-stream", "application/x-ndjson")


def check_stream(document: dict[str, Any], path: str, method: str, response: Any) -> int:
    """Compare the pieces of an answer with the document; return how many there are, 0 if it is not a stream.

    Raises:
        jsonschema.ValidationError: a piece is not as documented.
        AssertionError: the end of the stream is not.
    """
    media_type = response.headers["content-type"].partition(";")[0]
    if media_type not in STREAMS:
        return 0
    schema = document["paths"][path][method]["responses"]["200"]["content"][media_type]["schema"]
    pieces = [line for line in response.text.split("\n") if line]
    if media_type == STREAMS[0]:
        pieces = [line.removeprefix("data: ") for line in pieces if line.startswith("data: ")]
        data = schema["properties"]["data"]
        last, held = data.get("anyOf", (None, data))
        schema = held["contentSchema"]
        if last is not None:
            assert pieces[-1] == last["const"] or "error" in json.loads(pieces[-1])
            pieces = [piece for piece in pieces if piece != last["const"]]
    validator: Any = jsonschema.Draft202012Validator({**schema, "components": document["components"]})
    for piece in pieces:
        validator.validate(json.loads(piece))
    return len(pieces)
