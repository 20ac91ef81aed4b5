"""Sends the requests of a job, a number of them at a time, and again where a server was busy or away."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable
from time import monotonic

import httpx
import msgspec

from pagewood.server.jobs.lines import Failure, Line, Response, Result

_AGAIN = frozenset({429, 502, 503, 504})
_LONGEST_WAIT_S = 30.0


async def send_all(
    client: httpx.AsyncClient,
    lines: Iterable[Line],
    write: Callable[[Result], None],
    *,
    concurrency: int,
    patience_s: float,
) -> None:
    """Send requests in their order, and write each result as soon as it is there.

    Args:
        client: to the server; without a limit of time for answers.
        lines: the requests.
        write: called with each result.
        concurrency: requests at a time.
        patience_s: how long a request is sent again while the server is busy or does not answer.
    """
    waiting = iter(lines)

    async def work() -> None:
        for line in waiting:
            write(await _result(client, line, patience_s))

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())


async def _result(client: httpx.AsyncClient, line: Line, patience_s: float) -> Result:
    name, last_s, wait_s = f"batch_req_{uuid.uuid4().hex}", monotonic() + patience_s, 0.5
    while True:
        try:
            answer = await client.post(line.url, content=bytes(line.body), headers={"content-type": "application/json"})
        except httpx.TransportError as error:
            if monotonic() + wait_s > last_s:
                failure = Failure(code="connection_failed", message=f"{type(error).__name__}: {error}")
                return Result(id=name, custom_id=line.custom_id, response=None, error=failure)
        else:
            if answer.status_code not in _AGAIN or monotonic() + wait_s > last_s:
                response = Response(
                    status_code=answer.status_code,
                    request_id=answer.headers.get("x-request-id", ""),
                    body=_json(answer),
                )
                return Result(id=name, custom_id=line.custom_id, response=response)
            stated = answer.headers.get("retry-after", "")
            wait_s = max(wait_s, float(stated) if stated.isdecimal() else 0.0)
        await asyncio.sleep(min(wait_s, _LONGEST_WAIT_S))
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def _json(answer: httpx.Response) -> msgspec.Raw:
    """Return the body in one line; what is no JSON becomes a string."""
    try:
        return msgspec.Raw(msgspec.json.encode(msgspec.json.decode(answer.content)))
    except msgspec.DecodeError:
        return msgspec.Raw(msgspec.json.encode(answer.text))
