"""Lines of a job, as OpenAI's batches have them: requests, and results, one JSON object a line."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
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


class WrongLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line that is no request of a job."""

    line: int
    """Its number; the first one is 1."""
    code: str
    message: str
    param: str | None = None
    """The field that is wrong; None: the whole line."""


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """The lines of a file."""

    lines: list[Line]
    """Those that are right."""
    wrong: list[WrongLine]
    models: frozenset[str]
    """The models that they name."""


class _Body(msgspec.Struct, frozen=True):
    model: str | None = None
    stream: bool | None = None


def read_lines(file: Path) -> list[Line]:
    """Return all requests of a file; empty lines are skipped.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: lines are wrong; the first ones are named with their numbers.
    """
    found = check_lines(file)
    wrong = [f"line {one.line}: {one.message}" for one in found.wrong]
    if wrong:
        more = [f"and {len(wrong) - _MOST_SHOWN} more"] if len(wrong) > _MOST_SHOWN else []
        raise ValueError("\n  ".join([f"{file} must hold requests, one a line:", *wrong[:_MOST_SHOWN], *more]))
    return found.lines


def check_lines(file: Path, *, endpoint: Endpoint | None = None, max_lines: int | None = None) -> Checked:
    """Return all requests of a file, and what is wrong with the other lines; empty lines are skipped.

    Args:
        file: with a request in each line.
        endpoint: the `url` that all must have; None: any.
        max_lines: most requests; None: no limit.

    Raises:
        FileNotFoundError: there is no such file.
    """
    found: dict[str, Line] = {}
    numbers: dict[str, int] = {}
    wrong: list[WrongLine] = []
    models: set[str] = set()
    for count, (number, text) in enumerate(texts(file)):
        if count == max_lines:
            message = f"a file must have at most {max_lines} requests"
            wrong.append(WrongLine(line=number, code="too_many_requests", message=message))
            break
        try:
            line = msgspec.json.decode(text, type=Line)
            body = msgspec.json.decode(line.body, type=_Body)
        except msgspec.DecodeError as error:
            wrong.append(WrongLine(line=number, code="invalid_request_line", message=str(error)))
            continue
        if (why := _wrong(line, body, endpoint, numbers)) is not None:
            param, code, message = why
            wrong.append(WrongLine(line=number, code=code, message=message, param=param))
            continue
        found[line.custom_id], numbers[line.custom_id] = line, number
        models.update([] if body.model is None else [body.model])
    return Checked(lines=list(found.values()), wrong=wrong, models=frozenset(models))


def _wrong(
    line: Line, body: _Body, endpoint: Endpoint | None, numbers: Mapping[str, int]
) -> tuple[str, str, str] | None:
    """Return the wrong field of a line, a code and a message; None: the line is right."""
    if body.stream:
        return "body.stream", "invalid_value", "body.stream must be absent or false, got true"
    if endpoint is not None and line.url != endpoint:
        return "url", "mismatched_endpoint", f"url must be the endpoint of the batch, {endpoint}, got {line.url}"
    if line.custom_id in numbers:
        return (
            "custom_id",
            "duplicate_custom_id",
            f"custom_id must differ from those of other lines, got {line.custom_id!r}, as in line "
            f"{numbers[line.custom_id]}",
        )
    return None


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
    found = list(texts(file))
    for place, (number, text) in enumerate(found):
        try:
            result = msgspec.json.decode(text, type=Result)
        except msgspec.DecodeError as error:
            if place == len(found) - 1 and not text.endswith(b"\n"):
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


def texts(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not empty, with their numbers from 1 on."""
    with file.open("rb") as lines:
        for number, text in enumerate(lines, start=1):
            if text.strip():
                yield number, text
