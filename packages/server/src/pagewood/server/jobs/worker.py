"""Runs the batches of a store: sends their lines to the application of the same process, below all other requests."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from pagewood.server.jobs.ending import divide
from pagewood.server.jobs.lines import Line, Result, WrongLine, check_lines, keep_results
from pagewood.server.jobs.objects import BatchErrors, FileObject, RequestCounts, State, StoredBatch
from pagewood.server.jobs.sending import send_all
from pagewood.server.jobs.store import JobStore
from pagewood.server.keys.caller import Caller
from pagewood.server.keys.gate import KeyGate

MAX_LINES = 50_000
"""Most requests of a batch."""
MOST_AT_ONCE = 4
"""Batches whose lines are in memory at a time, each of another tenant."""
_MOST_ERRORS = 100
"""Wrong lines that a failed batch names."""
_LOOK_S = 30.0
_OK = 200
_TIMES: Mapping[State, str] = {
    state: f"{state}_at"
    for state in ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
}
_log = logging.getLogger("pagewood.server.jobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCounts:
    """The batches of a server, for its metrics."""

    batches: Mapping[State, int]
    """Those that are kept, by state."""
    num_answered: int
    """Lines that were answered since the start."""
    num_failed: int


class JobWorker:
    """Runs batches, the oldest first, at most one of a tenant at a time.

    A line is a request of the caller that created its batch, with a priority below all others. Results are written as
    they come, so a batch goes on behind them after any end of the process.

    Invariant: at most `num_lines` lines are under way. Each running batch gets the same share of them.

    Args:
        store: of the batches.
        owners: finds their callers.
        num_lines: lines under way at a time.
        priority: of all lines.
    """

    __slots__ = (
        *("_changed", "_num_lines", "_owners", "_places", "_priority", "_stops", "_tasks", "app_for"),
        *("num_answered", "num_failed", "store"),
    )

    def __init__(
        self,
        store: JobStore,
        *,
        owners: KeyGate,
        num_lines: int,
        priority: int,
    ) -> None:
        self.store = store
        self._owners = owners
        self._num_lines = num_lines
        self._priority = priority
        self._places = asyncio.Semaphore(num_lines)
        self._changed = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}  # written by: _begin, _job
        self._stops: dict[str, asyncio.Event] = {}  # written by: _begin, _job. Set when a batch is cancelled
        self.app_for: Callable[[Caller], ASGIApp] | None = None  # written by: Frontend.app
        self.num_answered = 0  # written by: _note
        self.num_failed = 0  # written by: _note

    @property
    def counts(self) -> JobCounts:
        """What there is, and what was done."""
        return JobCounts(
            batches=Counter(one.shown.status for one in self.store.all_batches()),
            num_answered=self.num_answered,
            num_failed=self.num_failed,
        )

    def added(self) -> None:
        """Note that the store has a new batch."""
        self._changed.set()

    def cancel(self, stored: StoredBatch) -> StoredBatch:
        """Begin to cancel a batch that is validated or in progress, and return it."""
        stored = self._enter(stored, "cancelling")
        if (stop := self._stops.get(stored.shown.id)) is not None:
            stop.set()
        self._changed.set()
        return stored

    async def run(self) -> None:
        """Run batches until this is cancelled."""
        try:
            while True:
                self._changed.clear()
                self.store.drop_expired()
                self._begin()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._changed.wait()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _begin(self) -> None:
        """Begin the batches whose turn it is, and those that only have to end."""
        now_s = self.store.now_s
        busy = {stored.tenant for id in self._tasks if (stored := self.store.batch(id)) is not None}
        for stored in self.store.open_batches():
            shown = stored.shown
            is_over = shown.status == "cancelling" or shown.expires_at <= now_s
            if shown.id in self._tasks or (not is_over and (stored.tenant in busy or len(busy) >= MOST_AT_ONCE)):
                continue
            busy.add(stored.tenant)
            self._stops[shown.id] = asyncio.Event()
            self._tasks[shown.id] = asyncio.create_task(self._job(shown.id))

    async def _job(self, id: str) -> None:
        """Take a batch to its end."""
        try:
            await self._validate(id)
            if self._state(id) != "failed":
                await self._finish(id, await self._send(id))
        except Exception:
            _log.exception("batch %s has failed by a defect of the server", id)
            self._fail(id, [WrongLine(line=0, code="internal_error", message="The server had an error.")])
        finally:
            del self._tasks[id], self._stops[id]
            self._changed.set()

    def _state(self, id: str) -> State:
        return self._stored(id).shown.status

    def _stored(self, id: str) -> StoredBatch:
        stored = self.store.batch(id)
        assert stored is not None
        return stored

    async def _validate(self, id: str) -> None:
        """Check all lines before the first one is sent."""
        if self._state(id) != "validating":
            return
        shown = self._stored(id).shown
        found = await asyncio.to_thread(check_lines, self.store.input(id), endpoint=shown.endpoint, max_lines=MAX_LINES)
        wrong = found.wrong
        if not found.lines and not wrong:
            wrong = [WrongLine(line=0, code="empty_file", message="the file must hold at least one request")]
        if self._state(id) != "validating":  # cancelled meanwhile
            return
        if wrong:
            self._fail(id, wrong[:_MOST_ERRORS])
            return
        counts = RequestCounts(total=len(found.lines))
        only = next(iter(found.models)) if len(found.models) == 1 else None
        self._enter(self._stored(id), "in_progress", request_counts=counts, model=only)

    async def _send(self, id: str) -> list[Line]:
        """Send the lines that have no result until all have one, the batch is cancelled or its time is over.

        Returns:
            The lines that have no result.
        """
        if self._state(id) == "finalizing":
            return []
        stored, file = self._stored(id), self.store.results(id)
        lines = (await asyncio.to_thread(check_lines, self.store.input(id), max_lines=MAX_LINES)).lines
        done = await asyncio.to_thread(keep_results, file)
        num_answered = list(done.values()).count(_OK)
        self._count(id, RequestCounts(total=len(lines), completed=num_answered, failed=len(done) - num_answered))
        left = {line.custom_id: line for line in lines if line.custom_id not in done}
        caller = self._owners.named(stored.tenant, stored.key)
        if self._state(id) != "in_progress" or not left:
            return list(left.values())
        if caller is None:
            why = "The API key that created the batch is no longer valid."
            self._fail(id, [WrongLine(line=0, code="invalid_api_key", message=why)])
            return []
        left_s = stored.shown.expires_at - self.store.now_s
        with file.open("ab") as out:

            def write(result: Result) -> None:
                out.write(msgspec.json.encode(result) + b"\n")
                out.flush()
                del left[result.custom_id]
                self._note(id, result)

            async with self._client(caller) as client:
                work = send_all(client, tuple(left.values()), write, concurrency=self._num_lines, patience_s=left_s)
                sending, stop = asyncio.create_task(work), asyncio.create_task(self._stops[id].wait())
                try:
                    await asyncio.wait({sending, stop}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                    if sending.done():
                        sending.result()
                finally:
                    for task in (sending, stop):
                        task.cancel()
                    await asyncio.gather(sending, stop, return_exceptions=True)
        return list(left.values())

    def _client(self, caller: Caller) -> httpx.AsyncClient:
        """Return a client whose requests are those of a caller, and take their turns among those of all batches."""
        assert self.app_for is not None
        app = _Turns(self.app_for(replace(caller, job_priority=self._priority)), self._places)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None)

    def _note(self, id: str, result: Result) -> None:
        counts = self._stored(id).shown.request_counts
        if result.response is not None and result.response.status_code == _OK:
            self.num_answered += 1
            counts = msgspec.structs.replace(counts, completed=counts.completed + 1)
        else:
            self.num_failed += 1
            counts = msgspec.structs.replace(counts, failed=counts.failed + 1)
        self._count(id, counts)

    def _count(self, id: str, counts: RequestCounts) -> None:
        stored = self._stored(id)
        shown = msgspec.structs.replace(stored.shown, request_counts=counts)
        self.store.put_batch(msgspec.structs.replace(stored, shown=shown), saves=False)

    async def _finish(self, id: str, left: list[Line]) -> None:
        """Make files of the results, and end the batch."""
        state = self._state(id)
        if state == "failed":
            return
        end: State = "cancelled" if state == "cancelling" else "expired" if left else "completed"
        if end == "completed" and state == "in_progress":
            self._enter(self._stored(id), "finalizing")
        answers, errors = self.store.new_upload(), self.store.new_upload()
        expired = left if end == "expired" else []
        found = await asyncio.to_thread(divide, self.store.results(id), answers=answers, errors=errors, expired=expired)
        stored = self._stored(id)
        files: dict[str, Any] = {}
        for kind, file in (("output", answers), ("error", errors)):
            files[f"{kind}_file_id"] = self._keep(stored, kind, file)
        counts = msgspec.structs.replace(
            stored.shown.request_counts, completed=found.num_answered, failed=found.num_failed
        )
        if self._state(id) == "cancelling":  # asked for meanwhile
            end = "cancelled"
        self._enter(stored, end, request_counts=counts, usage=found.usage, **files)

    def _keep(self, stored: StoredBatch, kind: str, upload: Path) -> str | None:
        """Keep a file of results, and return its id; None: it is empty."""
        num_bytes = upload.stat().st_size
        if not num_bytes:
            upload.unlink()
            return None
        shown, now_s = stored.shown, self.store.now_s
        file = FileObject(
            id=f"file-{shown.id.removeprefix('batch_')}-{kind}",
            bytes=num_bytes,
            created_at=now_s,
            expires_at=None if stored.output_expires_s is None else now_s + stored.output_expires_s,
            filename=f"{shown.id}_{kind}.jsonl",
            purpose="batch_output",
        )
        self.store.add_file(upload, file, stored.tenant)
        return file.id

    def _fail(self, id: str, errors: list[WrongLine]) -> None:
        self._enter(self._stored(id), "failed", errors=BatchErrors(data=errors))

    def _enter(self, stored: StoredBatch, state: State, **changes: Any) -> StoredBatch:
        """Note the next state of a batch, and return it."""
        times = {_TIMES[state]: self.store.now_s}
        shown = msgspec.structs.replace(stored.shown, status=state, **times, **changes)
        stored = msgspec.structs.replace(stored, shown=shown)
        self.store.put_batch(stored)
        counts = shown.request_counts
        _log.info(
            "batch %s is %s: %d of %d lines answered, %d failed",
            *(shown.id, state, counts.completed, counts.total, counts.failed),
            extra={"fields": {"batch_id": shown.id, "status": state, "tenant": stored.tenant}},
        )
        return stored


class _Turns:
    """An ASGI application around another one, which serves a number of requests at a time in their order."""

    __slots__ = ("_app", "_places")

    def __init__(self, app: ASGIApp, places: asyncio.Semaphore) -> None:
        self._app = app
        self._places = places

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request when it is its turn."""
        async with self._places:
            try:
                await self._app(scope, receive, send)
            except Exception:
                _log.exception("a request of a batch has failed by a defect of the server")
                raise
