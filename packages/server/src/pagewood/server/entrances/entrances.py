"""The entrances of a server, as the first HTTP process sees them: their processes, and the exchanges they pass on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio
from starlette.types import ASGIApp

from pagewood.server.config import ServeConfig
from pagewood.server.entrances.messages import (
    Asked,
    Connected,
    EntranceSettings,
    Frame,
    FromEntrance,
    Received,
    ToEntrance,
    Written,
    encode,
    read_frame,
)
from pagewood.server.entrances.outbox import Outbox
from pagewood.server.entrances.passed_exchange import PassedExchange
from pagewood.server.messages.links import NO_MARK, ZmqSender, address
from pagewood.server.models.engine_group import EXIT_CRASH_LOOP, EXIT_FAILED
from pagewood.server.observe.incidents import Incidents
from pagewood.server.processes.child import Settings
from pagewood.server.processes.supervisor import Stage, Supervisor

SOCKET = "entrances"
"""Where the first process hears of all entrances."""
_log = logging.getLogger(__name__)


class PassedExchanges:
    """The exchanges of all entrances, each with a task in which the application answers it.

    Invariant: what an incarnation says after its death is dropped, and its exchanges have no client any more.

    Args:
        app: the application.
        senders: one to each entrance.
        tasks: where the tasks are added while they run.
    """

    __slots__ = ("_app", "_incarnations", "_num_connections", "_open", "_outboxes", "_tasks")

    def __init__(
        self,
        app: ASGIApp,
        senders: Sequence[Callable[[bytes], None]],
        *,
        tasks: set[asyncio.Task[None]],
    ) -> None:
        self._app, self._tasks = app, tasks
        self._outboxes = [Outbox[ToEntrance](lambda said, send=send: send(encode(said))) for send in senders]
        self._incarnations = [0 for _ in senders]  # contents written by: lost
        self._num_connections: dict[int, int] = {}  # contents written by: take, lost. By entrance
        self._open: dict[tuple[int, int], PassedExchange] = {}  # contents written by: _begin, _answer

    @property
    def num_connections(self) -> int:
        """Connections of all entrances."""
        return sum(self._num_connections.values())

    def is_there(self, entrance: int) -> bool:
        """Return whether an entrance takes connections."""
        return entrance in self._num_connections

    def take(self, frame: Frame) -> None:
        """Take what an entrance says."""
        if frame.incarnation == self._incarnations[frame.entrance]:
            for message in frame.messages:
                self._take(frame.entrance, message)

    def lost(self, entrance: int, *, next_incarnation: int) -> None:
        """Note that the process of an entrance has died."""
        self._incarnations[entrance] = next_incarnation
        self._num_connections.pop(entrance, None)
        self._outboxes[entrance].clear()
        for (of, _), exchange in self._open.items():
            if of == entrance:
                exchange.leave()

    def _take(self, entrance: int, message: FromEntrance) -> None:
        match message:
            case Connected(num=num):
                self._num_connections[entrance] = num
            case Asked():
                self._begin(entrance, message)
            case Received() | Written():
                exchange = self._open.get((entrance, message.number))
                if exchange is not None:
                    exchange.take(message)

    def _begin(self, entrance: int, asked: Asked) -> None:
        incarnation, outbox = self._incarnations[entrance], self._outboxes[entrance]

        def put(message: ToEntrance) -> None:
            if incarnation == self._incarnations[entrance]:
                outbox.put(message)

        key, exchange = (entrance, asked.number), PassedExchange(asked, put)
        self._open[key] = exchange
        task = asyncio.create_task(self._answer(key, exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, key: tuple[int, int], exchange: PassedExchange) -> None:
        try:
            await self._app(exchange.scope(), exchange.receive, exchange.send)
        except Exception:
            _log.exception("a request failed")
        finally:
            exchange.end()
            if self._open.get(key) is exchange:
                del self._open[key]


class Entrances:
    """The entrances of a server. Invariant: one that dies takes its own connections with it, and is started again.

    Args:
        config: of the server; it has `http_processes - 1` entrances.
        app: answers requests.
        first: settings of the first one.
        folder: of the sockets.
        context: of the sockets.
        tasks: where the tasks of requests are added while they run.
        incidents: where restarts are counted.
        give_up: called with the reason and an exit code if one cannot be started, or keeps dying.
    """

    __slots__ = ("_config", "_exchanges", "_first", "_folder", "_senders", "_stages", "_supervisor")

    def __init__(
        self,
        config: ServeConfig,
        app: ASGIApp,
        *,
        first: EntranceSettings,
        folder: Path,
        context: zmq.Context[zmq.Socket[bytes]],
        tasks: set[asyncio.Task[None]],
        incidents: Incidents,
        give_up: Callable[[str, int], None],
    ) -> None:
        self._config, self._folder, self._first = config, folder, first
        self._stages = [_stage(number) for number in range(1, config.http_processes)]
        self._senders = [ZmqSender(context, address(folder, stage.name)) for stage in self._stages]
        self._exchanges = PassedExchanges(app, [sender.send for sender in self._senders], tasks=tasks)
        self._supervisor = Supervisor(
            self._stages,
            settings=self._settings,
            was_ready=lambda: all(map(self._exchanges.is_there, range(len(self._stages)))),
            on_death=self._on_death,
            on_failure=lambda why: give_up(why, EXIT_FAILED),
            on_crash_loop=lambda why: give_up(why, EXIT_CRASH_LOOP),
            max_quick_deaths=config.max_quick_deaths,
            incidents=incidents,
        )

    @property
    def num_connections(self) -> int:
        """Connections of all entrances."""
        return self._exchanges.num_connections

    def start(self) -> None:
        """Start the processes."""
        self._supervisor.start()

    def pids(self) -> Mapping[str, int]:
        """Return the process ids by name."""
        return self._supervisor.pids()

    async def run(self) -> None:
        """Pass on what the entrances say, until cancelled."""
        with zmq.asyncio.Context() as context, context.socket(zmq.PULL) as inbox:
            inbox.setsockopt(zmq.RCVHWM, NO_MARK)
            inbox.bind(address(self._folder, SOCKET))
            while True:
                frame = await inbox.recv()
                try:
                    self._exchanges.take(read_frame.decode(frame))
                except Exception:  # it ends only what it is about
                    _log.exception("what an entrance said cannot be handled")

    async def stop(self) -> None:
        """End the processes."""
        await self._supervisor.stop()

    def close(self) -> None:
        """Close the sockets."""
        for sender in self._senders:
            sender.close()

    def kill_all(self) -> None:
        """Kill all processes without waiting for them; safe in a signal handler."""
        self._supervisor.kill_all()

    def _on_death(self, stage: Stage, next_incarnation: int) -> None:
        index = self._stages.index(stage)
        self._exchanges.lost(index, next_incarnation=next_incarnation)
        self._senders[index].reconnect()

    def _settings(self, stage: Stage, incarnation: int) -> Settings:
        config = self._config
        return Settings(
            folder=str(self._folder),
            stage=stage.name,
            listen=stage.name,
            send_to=SOCKET,
            model_folder=str(config.model_folder),
            incarnation=incarnation,
            log_level=config.log_level,
            log_format=config.log_format,
            engine=config.engine,
            entrance=msgspec.structs.replace(self._first, index=self._stages.index(stage)),
        )


def _stage(number: int) -> Stage:
    return Stage(name=f"http-{number}", module="pagewood.server.processes.entrance_process", computes=False)
