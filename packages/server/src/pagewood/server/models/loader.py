"""Starts the processes of one of several models, and ends them."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import zmq

from pagewood.server.http.errors import unavailable
from pagewood.server.metrics.processes import usage_of
from pagewood.server.models.lifecycle import Lifecycle, Phase
from pagewood.server.models.memory import measured_bytes
from pagewood.server.requests.status import EngineState


class Loader:
    """Starts and ends the processes of models. Invariant: each start has a folder of its own.

    Args:
        folder: below it are the folders of the sockets.
        context: of the sockets.
    """

    __slots__ = ("_context", "_folder", "_num_folders")

    def __init__(self, *, folder: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._folder, self._context = folder, context
        self._num_folders = 0  # written by: start

    async def start(
        self, one: Lifecycle, *, is_draining: bool, on_loss: Callable[[Lifecycle, str], None]
    ) -> str | None:
        """Start the processes of a model; return None when it is ready, or why it will not be.

        The result is also that of `one.outcome`, if it gets one before.

        Args:
            one: the model.
            is_draining: whether no requests are taken for the time being.
            on_loss: called with the model and a reason if its processes do not stay alive, once it has been ready.
        """
        outcome = one.outcome
        assert outcome is not None
        self._num_folders += 1
        folder = self._folder / f"m{self._num_folders}"  # short: it is part of the addresses of sockets
        folder.mkdir(mode=0o700)

        def give_up(why: str, code: int) -> None:
            del code
            if not outcome.done():
                outcome.set_result(why)
            elif one.phase is Phase.LOADED:
                on_loss(one, why)

        def on_news() -> None:
            if not outcome.done() and group.status.state is EngineState.READY:
                outcome.set_result(None)

        group = one.model.begin(folder=folder, context=self._context, title=one.name, give_up=give_up, on_news=on_news)
        group.live.set_draining(is_draining)
        group.start()
        service = one.model.serve()
        one.work = [asyncio.create_task(work) for work in group.work(service)]
        why = await outcome
        if why is None:
            one.model.note()
            _measure(one)
        return why

    async def end(self, one: Lifecycle) -> None:
        """End the processes of a model, and forget them."""
        group = one.model.group
        if group is None:
            return
        group.live.close_door()
        group.live.fail_all(unavailable(f"The model '{one.name}' was unloaded.", code="model_unloaded"))
        await group.stop()
        for task in one.work:
            task.cancel()
        await asyncio.gather(*one.work, return_exceptions=True)
        one.work = []
        one.num_ends += 1
        one.model.end()
        shutil.rmtree(group.folder, ignore_errors=True)  # some sockets


def _measure(one: Lifecycle) -> None:
    """Note what a model takes that has just been loaded, if the system says so."""
    group, model = one.model.group, one.model.model
    assert group is not None
    assert model is not None
    usage = usage_of(group.pids())
    if usage:
        one.need_bytes = measured_bytes(model, usage.values(), one.model.config.engine)
