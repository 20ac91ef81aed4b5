# pyright: basic
# FastAPI need not be installed.
"""An asyncio job queue with a scheduling policy, and the same behind FastAPI; it has nothing to do with LLMs."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from pagewood.schedpolicy import Order, Outcome, Quota, Quotas, order_named


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """Work for a tenant; `num_tokens` is its estimated cost."""

    work: Callable[[], Awaitable[Any]]
    arrival: int
    arrived_s: float
    tenant: str
    num_tokens: int
    priority: int = 0
    num_matched: int = 0
    num_generated: int = 0
    max_new_tokens: int = 0
    answer: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class JobQueue:
    """Runs at most `num_places` jobs at once, at most `per_tenant` of each tenant, in the order of a policy."""

    def __init__(self, *, policy: str = "fair", num_places: int = 4, per_tenant: int = 3) -> None:
        self._waiting: Order[Job] = order_named(policy)
        self._quotas = Quotas({}, default=Quota(max_running=per_tenant))
        self._num_places = num_places
        self._running: set[asyncio.Task[None]] = set()
        self._arrivals = count()

    async def run(self, tenant: str, work: Callable[[], Awaitable[Any]], *, cost: int = 1, priority: int = 0) -> Any:
        """Wait for a place, do the work, and return its result; a cancelled call leaves the queue."""
        job = Job(
            work=work,
            arrival=next(self._arrivals),
            arrived_s=time.monotonic(),
            tenant=tenant,
            num_tokens=cost,
            priority=priority,
        )
        self._waiting.add(job)
        self._start()
        try:
            return await job.answer
        finally:
            if job in self._waiting:
                self._waiting.remove(job)

    def _start(self) -> None:
        """Start the jobs that may start; a tenant at its quota is passed over, and others do not wait for it."""
        admitted: list[Job] = []
        for job in self._waiting.ordered(time.monotonic()):
            if len(self._running) == self._num_places:
                break
            if self._quotas.check(job).outcome is Outcome.CONTINUE:
                self._quotas.admit(job)
                admitted.append(job)
                self._running.add(asyncio.create_task(self._do(job)))
        for job in admitted:
            self._waiting.admit(job)

    async def _do(self, job: Job) -> None:
        try:
            answer = await job.work()
        except Exception as error:
            if not job.answer.done():
                job.answer.set_exception(error)
        else:
            if not job.answer.done():
                job.answer.set_result(answer)
        finally:
            task = asyncio.current_task()
            assert task is not None
            self._running.discard(task)
            self._waiting.stop(job)
            self._quotas.stop(job)
            self._start()


def make_app(queue: JobQueue) -> Any:
    """Return a FastAPI application: `POST /jobs?tenant=a&seconds=0.1` sleeps when its turn comes."""
    from fastapi import FastAPI  # pyright: ignore[reportMissingImports]

    app = FastAPI()

    @app.post("/jobs")
    async def create_job(tenant: str, seconds: float) -> dict[str, str]:
        await queue.run(tenant, lambda: asyncio.sleep(seconds), cost=max(1, int(1000 * seconds)))
        return {"tenant": tenant, "state": "done"}

    return app
