"""Lines of a job, as OpenAI's batches have them: requests, and results, one JSON object a line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
_MOST_SHOWN = 10
_SERVER_ERROR = 500


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A request."""

    custom_id: str
    """Names it in the results; no two lines have the same."""
    method: Literal["POST"] = "POST"
    url: Endpoint
    body: msgspec.Raw
    """JSON object, as the endpoint takes it, without `stream`."""


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """What a server has answered."""

    status_code: int
    request_id: str
    body: msgspec.Raw
    """JSON, also that of an error."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why there is no answer."""

    code: str
    message: str


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What has become of a request."""

    id: str
    custom_id: str
    response: Response | None
    error: Failure | None = None

    @property
    def is_final(self) -> bool:
        """Whether sending the request again would be of no use: it was answered or refused, and did not fail."""
        return self.response is not None and self.response.status_code < _SERVER_ERROR


class _Body(msgspec.Struct, frozen=True):
    stream: bool | None = None


def read_lines(file: Path) -> list[Line]:
    """Return all requests of a file; empty lines are skipped.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: lines are wrong; the first ones are named with their numbers.
    """
    found: dict[str, Line] = {}
    numbers: dict[str, int] = {}
    wrong: list[str] = []
    for number, text in _texts(file):
        try:
            line = msgspec.json.decode(text, type=Line)
            if msgspec.json.decode(line.body, type=_Body).stream:
                raise ValueError("body.stream must be absent or false, got true")
            if line.custom_id in found:
                raise ValueError(
                    f"custom_id must differ from those of other lines, got {line.custom_id!r}, as in line "
                    f"{numbers[line.custom_id]}"
                )
        except (msgspec.DecodeError, ValueError) as error:
            wrong.append(f"line {number}: {error}")
            continue
        found[line.custom_id], numbers[line.custom_id] = line, number
    if wrong:
        more = [f"and {len(wrong) - _MOST_SHOWN} more"] if len(wrong) > _MOST_SHOWN else []
        raise ValueError("\n  ".join([f"{file} must hold requests, one a line:", *wrong[:_MOST_SHOWN], *more]))
    return list(found.values())


def keep_results(file: Path) -> dict[str, int]:
    """Return custom_id -> status code of the final results that a file holds, and remove all other lines from it.

    Those are results that were to come again, and the end of a line that a killed process has begun.

    Raises:
        ValueError: the file holds something else.
    """
    if not file.exists():
        return {}
    kept: dict[str, bytes] = {}
    statuses: dict[str, int] = {}
    texts = list(_texts(file))
    for place, (number, text) in enumerate(texts):
        try:
            result = msgspec.json.decode(text, type=Result)
        except msgspec.DecodeError as error:
            if place == len(texts) - 1 and not text.endswith(b"\n"):
                continue
            raise ValueError(f"{file} must be new or hold results of this job, line {number}: {error}") from error
        if result.response is not None and result.is_final:
            statuses[result.custom_id] = result.response.status_code
            kept[result.custom_id] = text if text.endswith(b"\n") else text + b"\n"
    new = file.with_name(file.name + ".new")
    with new.open("wb") as out:
        out.writelines(kept.values())
        out.flush()
        os.fsync(out.fileno())
    new.replace(file)
    return statuses


def counted_tokens(response: Response) -> tuple[int, int]:
    """Return tokens of the prompt and of the answer, as the response counts them."""
    body: dict[str, Any] = msgspec.json.decode(response.body)
    usage: dict[str, Any] = body.get("usage") or {}
    prompt = usage.get("prompt_tokens", usage.get("input_tokens", 0))
    return prompt, usage.get("completion_tokens", usage.get("output_tokens", 0))


def _texts(file: Path) -> Iterator[tuple[int, bytes]]:
    with file.open("rb") as lines:
        for number, text in enumerate(lines, start=1):
            if text.strip():
                yield number, text
