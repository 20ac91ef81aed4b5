"""The engine process of a replica: the ordinary one of a server, started and watched in the ordinary way."""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
from collections.abc import AsyncGenerator
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import zmq
import zmq.asyncio

from pagewood.server.config import ServeConfig
from pagewood.server.messages import wire
from pagewood.server.messages.links import NO_MARK, ZmqSender, address
from pagewood.server.models.engine_group import ENGINE, HTTP
from pagewood.server.observe import logs
from pagewood.server.processes.child import STOP_GRACE_S, Settings
from pagewood.server.processes.supervisor import Stage, Supervisor
from pagewood.server.ray.calls import kind_of
from pagewood.server.ray.link import Links, LostEngineError
from pagewood.server.ray.scaling import KV_USE, PLACES, RUNNING, WAITING
from pagewood.server.replicas.roster import Seat
from pagewood.server.requests.status import EngineState, EngineStatus


class ServedEngine:
    """A Serve replica with one engine, and the links over which processes with requests use it.

    It is not started again: when it ends, all links fail, and Ray Serve starts another replica.
    """

    async def __init__(self, config: ServeConfig) -> None:
        logs.configure(config.log_level, "engine-replica", form=config.log_format)
        self._config = config
        self._events, self._replay = (with_port(one) for one in (config.kv_events, config.kv_events_replay))
        self._folder = Path(tempfile.mkdtemp(prefix="pagewood-"))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._commands = ZmqSender(self._context, address(self._folder, ENGINE.name))
        self._links = Links(self._commands.send)
        self._status = EngineStatus()
        self._failed: str | None = None  # written by: _fail
        self._is_ready = asyncio.Event()
        self._supervisor = Supervisor(
            [ENGINE],
            settings=self._settings,
            was_ready=lambda: False,  # so that it is started once
            on_death=lambda stage, incarnation: None,
            on_failure=self._fail,
            on_crash_loop=self._fail,
        )
        self._receiver = asyncio.create_task(self._receive())
        self._supervisor.start()
        await self._is_ready.wait()
        self.check_health()

    def check_health(self) -> None:
        """Raise LostEngineError if the engine has ended, or is stuck."""
        if self._failed is not None or self._status.state is EngineState.STALLED:
            raise LostEngineError(self._failed or self._status.detail)

    async def wake(self) -> None:
        """Do nothing: the caller waits for an engine."""

    async def link(self, *, replica: str, name: str, seat: Seat) -> AsyncGenerator[list[bytes]]:
        """Yield the kind of the engine, then all that it says to the process with that name."""
        self.check_health()
        link = self._links.open(name, seat)
        try:
            yield [kind_of(self._config.engine).encode()]
            while True:
                yield await link.take()
        finally:
            self._links.close(name)

    async def tell(self, *, replica: str, name: str, number: int, frame: bytes) -> None:
        """Give the engine a command, and return when its answer has ended, if it has one."""
        ended = self._links.tell(name, number, frame)
        if ended is not None:
            await ended.wait()

    async def note_waiting(self, *, replica: str, name: str, num: int) -> None:
        """Note how many requests wait in a process for a place on any engine."""
        self._links.note_waiting(name, num)

    def record_replica_metadata(self) -> dict[str, object]:
        """Return what stays as it is: the model, the size of a page, and where the changes of the cache are."""
        config = self._config
        host = str(import_module("ray.util").get_node_ip_address())
        return {
            "model": config.served_model_name,
            "page_size": config.engine.page_size,
            "max_running": config.engine.num_rows,
            "kv_events": reachable(self._events, host),
            "kv_events_replay": reachable(self._replay, host),
            "kv_events_topic": config.kv_events_topic,
        }

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what decides how many engines there should be."""
        counters, measured = self._status.counters, self._status.measurement
        num_pages = counters.get("num_pages", 0)
        return {
            WAITING: float(self._links.num_waiting),
            RUNNING: float(counters.get("num_running", 0) + counters.get("num_waiting", 0)),
            PLACES: float(self._config.engine.num_rows),
            KV_USE: 1 - measured.num_available_pages / num_pages if measured is not None and num_pages else 0.0,
        }

    async def __del__(self) -> None:
        """End the engine."""
        self._receiver.cancel()
        await asyncio.gather(self._receiver, return_exceptions=True)
        await self._supervisor.stop()
        self._commands.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _receive(self) -> None:
        with zmq.asyncio.Context() as context, context.socket(zmq.PULL) as inbox:
            inbox.setsockopt(zmq.RCVHWM, NO_MARK)
            inbox.bind(address(self._folder, HTTP))
            while True:
                frame = await inbox.recv()
                for message in wire.read(wire.from_engine, [frame]):
                    if isinstance(message, wire.Loading | wire.Pulse):
                        self._status.take(message)
                        if isinstance(message, wire.Pulse):  # one a second at least
                            self._is_ready.set()
                            self._links.expire()
                    self._links.take(message)

    def _fail(self, why: str) -> None:
        self._failed = why
        self._links.fail(LostEngineError(why))
        self._is_ready.set()

    def _settings(self, stage: Stage, incarnation: int) -> Settings:
        config = self._config
        return Settings(
            folder=str(self._folder),
            stage=stage.name,
            listen=stage.name,
            send_to=HTTP,
            model_folder=str(config.model_folder),
            incarnation=incarnation,
            stop_grace_s=STOP_GRACE_S,
            log_level=config.log_level,
            log_format=config.log_format,
            is_routed=True,
            engine=replace(config.engine, quotas=()),  # the router counts them
            images=config.image_limits,
            kv_events=self._events,
            kv_events_replay=self._replay,
            kv_events_form=config.kv_events_form,
            kv_events_topic=config.kv_events_topic,
        )


def with_port(address: str | None) -> str | None:
    """Return an address such as `tcp://*:*` with a port that is free now."""
    if address is None:
        return None
    with socket.socket() as found:
        found.bind(("", 0))
        return f"{address.removesuffix('*')}{found.getsockname()[1]}"


def reachable(address: str | None, host: str) -> str | None:
    """Return how other hosts reach what was bound to `address` on `host`."""
    return None if address is None else address.replace("*", host).replace("0.0.0.0", host)
