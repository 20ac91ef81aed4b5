"""A run: conversations begin at their times, or when there is room, and every request gets a record."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from pagewood.server.bench.client import Sender
from pagewood.server.bench.records import Record
from pagewood.server.bench.workloads import Conversation, History

_LAG_S = 0.05
"""Seconds between two checks of the client's event loop."""


@dataclass(slots=True, kw_only=True)
class Progress:
    """The results so far, for a display of progress."""

    records: list[Record] = field(default_factory=list[Record])  # written by: run
    """The records of requests that were begun."""
    num_ended: int = 0  # written by: run
    num_failed: int = 0  # written by: run
    num_tokens: int = 0  # written by: run
    """Output tokens of requests that have ended."""
    lag_s: float = 0.0  # written by: run
    """The longest time that the client itself was busy: shorter times say nothing about the server."""


async def run(
    sender: Sender,
    conversations: Iterator[Conversation],
    *,
    num_conversations: int | None = None,
    duration_s: float | None = None,
    concurrency: int | None = None,
    gaps: Iterator[float] | None = None,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Progress:
    """Send conversations and wait for all answers.

    Without `gaps`, and if turns have no times, `concurrency` conversations are under way at any time (a closed loop).
    Otherwise they begin at their times, and wait only if `concurrency` are under way.

    Args:
        sender: sends each request.
        conversations: what is sent.
        num_conversations: how many; None: all, or as many as begin within `duration_s`.
        duration_s: none begins after this time; None: no limit.
        concurrency: most conversations under way; None: no limit.
        gaps: seconds between two beginnings.
        progress: updated during the run.
        clock: seconds, that of `sender`.

    Returns:
        The progress at the end.

    Raises:
        ValueError: nothing limits the number of requests sent at once.
    """
    progress = progress or Progress()
    room = asyncio.Semaphore(concurrency) if concurrency is not None else None
    start_s = due_s = clock()
    tasks: set[asyncio.Task[None]] = set()
    watch = asyncio.create_task(_watch(progress, clock))
    try:
        for index, one in enumerate(islice(conversations, num_conversations)):
            after_s = one.turns[0].after_s
            if after_s is not None:
                due_s = start_s + after_s
            elif gaps is not None:
                due_s += next(gaps) if index else 0.0
            elif room is None:
                raise ValueError("concurrency must be given if there are no times of arrival, got None")
            if duration_s is not None and due_s - start_s >= duration_s:
                break
            if (wait_s := due_s - clock()) > 0:
                await asyncio.sleep(wait_s)
            if room is not None:
                await room.acquire()
            is_open = after_s is not None or gaps is not None
            now_s = clock()
            if duration_s is not None and now_s - start_s >= duration_s:
                if room is not None:
                    room.release()
                break
            task = asyncio.create_task(_converse(sender, one, due_s if is_open else now_s, room, progress, clock))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        while tasks:
            await asyncio.wait(tasks)
    finally:
        watch.cancel()
        for task in tasks:
            task.cancel()
    return progress


async def _converse(
    sender: Sender,
    conversation: Conversation,
    planned_s: float,
    room: asyncio.Semaphore | None,
    progress: Progress,
    clock: Callable[[], float],
) -> None:
    history = History()
    try:
        for index, turn in enumerate(conversation.turns):
            record = Record(planned_s=planned_s if index == 0 else clock())
            progress.records.append(record)
            history.say(turn)
            is_last = index == len(conversation.turns) - 1
            await sender.send(history, turn.max_tokens, record, keeps_text=not is_last)
            progress.num_ended += 1
            progress.num_tokens += record.num_output
            if not record.is_complete:
                progress.num_failed += 1
                break
            history.answer(record.text)
            record.text = ""  # conversations may be long
    finally:
        if room is not None:
            room.release()


async def _watch(progress: Progress, clock: Callable[[], float]) -> None:
    while True:
        before_s = clock()
        await asyncio.sleep(_LAG_S)
        progress.lag_s = max(progress.lag_s, clock() - before_s - _LAG_S)
