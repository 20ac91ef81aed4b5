"""The only model of a server: loaded at the start, and there until the end."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from pagewood.server.models.served_model import ServedModel
from pagewood.server.replicas.fleet_status import ServerStatus
from pagewood.server.requests.live import LiveRequests

if TYPE_CHECKING:
    from pagewood.server.http.operations import Operation
    from pagewood.server.protocols.common.models import Models
    from pagewood.server.protocols.common.reader import Reader


class SingleModel:
    """The only model of a server, with its processes. Invariant: if it cannot be served, the server ends.

    Args:
        model: which it is.
        folder: of the sockets.
        context: of the sockets.
        give_up: called with a reason and an exit code if the model cannot be served, or no longer.
        on_news: called after the state of an engine may have changed.
    """

    __slots__ = ("_group", "_model")

    def __init__(
        self,
        model: ServedModel,
        *,
        folder: Path,
        context: zmq.Context[zmq.Socket[bytes]],
        give_up: Callable[[str, int], None],
        on_news: Callable[[ServerStatus], None],
    ) -> None:
        self._model = model
        self._group = model.begin(
            folder=folder,
            context=context,
            title="",
            give_up=give_up,
            on_news=lambda: on_news(self._group.status),
        )

    @property
    def held(self) -> LiveRequests:
        """Its requests."""
        return self._group.live

    async def start(self) -> None:
        """Start all processes, and return when each was started once, or failed to start."""
        self._group.start()
        await self._group.launched()

    def models(self, reader: Reader) -> Models:
        """Return the model, for the endpoints."""
        from pagewood.server.protocols.common.models import OnlyModel

        return OnlyModel(service=self._model.serve(), reader=reader)

    def operations(self) -> Sequence[Operation]:
        """Return no operations beyond those of every server."""
        return ()

    def work(self) -> Sequence[Coroutine[Any, Any, None]]:
        """Return what must run while the server runs; call it after `models`."""
        assert self._model.service is not None
        return self._group.work(self._model.service)

    def begin_to_replace(self) -> None:
        """Begin to replace the engine."""
        self._group.begin_to_replace()

    def pids(self) -> Mapping[str, int]:
        """Return the process ids by name."""
        return self._group.pids()

    def kill_all(self) -> None:
        """Kill all processes without waiting for them; safe in a signal handler."""
        self._group.kill_all()

    async def stop(self) -> None:
        """End all processes."""
        await self._group.stop()

    def close(self) -> None:
        """Close the sockets; call it when nothing of `work` runs any more."""
        self._model.end()
