"""An entrance in the process of the test, behind which the application of a server answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from pagewood.server.entrances.entrance import Entrance
from pagewood.server.entrances.entrances import PassedExchanges
from pagewood.server.entrances.messages import Frame, FromEntrance, encode, read_frame, read_messages
from pagewood.server.entrances.outbox import Outbox
from pagewood.server.http.connections import Site


def behind_an_entrance(site: Site) -> Site:
    """Return what an entrance serves that has `site` answer; both use its table of connections."""
    loop = asyncio.get_running_loop()

    def to_entrance(frame: bytes) -> None:
        for message in read_messages.decode(frame):
            loop.call_soon(entrance.take, message)

    exchanges = PassedExchanges(site.app, [to_entrance], tasks=set())

    def to_first(said: Sequence[FromEntrance]) -> None:
        loop.call_soon(exchanges.take, read_frame.decode(encode(Frame(0, 0, tuple(said)))))

    entrance = Entrance(Outbox[FromEntrance](to_first), is_crowded=lambda: site.connections.is_crowded)
    return replace(site, app=entrance)
