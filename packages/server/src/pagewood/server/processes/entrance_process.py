"""An entrance: `python -m pagewood.server.processes.entrance_process`, started by the server if it has several."""

from __future__ import annotations

import asyncio
from pathlib import Path

import uvloop

from pagewood.server.entrances.entrance import Entrance
from pagewood.server.entrances.messages import Connected, Frame, FromEntrance, encode, read_messages
from pagewood.server.entrances.outbox import Outbox
from pagewood.server.http.connections import Connections, Site
from pagewood.server.http.http_server import http_server
from pagewood.server.http.listening import bind
from pagewood.server.messages.links import ZmqReceiver, ZmqSender
from pagewood.server.processes.child import ParentWatch, Settings, errors_in_one_line, run_child

REPORT_S = 0.2
"""How often the number of connections is said, if it has changed."""


def serve(settings: Settings, inbox: ZmqReceiver, outbox: ZmqSender, stopped: ParentWatch) -> None:
    """Take connections until the parent ends it."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, inbox, outbox, stopped))


async def _serve(settings: Settings, inbox: ZmqReceiver, outbox: ZmqSender, stopped: ParentWatch) -> None:
    wanted = settings.entrance
    assert wanted is not None
    connections = Connections(wanted.limits)
    to_first = Outbox[FromEntrance](
        lambda said: outbox.send(encode(Frame(wanted.index, settings.incarnation, tuple(said))))
    )
    entrance = Entrance(to_first, is_crowded=lambda: connections.is_crowded)
    with errors_in_one_line(settings):
        listening = bind(wanted.host, wanted.port, is_shared=True)
        server = http_server(
            Site(app=entrance, limits=wanted.limits, connections=connections),
            stop_grace_s=wanted.stop_grace_s,
            tls_cert=None if wanted.tls is None else Path(wanted.tls[0]),
            tls_key=None if wanted.tls is None else Path(wanted.tls[1]),
            trusted_proxies=wanted.trusted_proxies,
        )
    loop = asyncio.get_running_loop()

    def take() -> None:
        for frame in inbox.receive(timeout_s=0):
            for message in read_messages.decode(frame):
                entrance.take(message)

    def stop() -> None:
        loop.remove_reader(stopped.fileno())
        server.should_exit = True  # not ours

    loop.add_reader(inbox.fileno(), take)
    loop.add_reader(stopped.fileno(), stop)
    reporting = asyncio.create_task(_report(connections, to_first))
    try:
        await server.serve(sockets=[listening])
    finally:
        reporting.cancel()
        loop.remove_reader(inbox.fileno())


async def _report(connections: Connections, outbox: Outbox[FromEntrance]) -> None:
    said: int | None = None
    while True:
        if said != len(connections):
            said = len(connections)
            outbox.put(Connected(said))
        await asyncio.sleep(REPORT_S)


if __name__ == "__main__":
    run_child(serve)
