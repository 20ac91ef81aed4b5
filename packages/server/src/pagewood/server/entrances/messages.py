"""What an entrance and the first HTTP process say to each other: the events of ASGI, as messages.

    entrance --ToFirst--> first --ToEntrance--> entrance

Exchanges of an entrance have numbers. A frame holds the messages of one turn of an event loop.
"""

from __future__ import annotations

import msgspec

from pagewood.server.http.limits import HttpLimits

Headers = tuple[tuple[bytes, bytes], ...]


class EntranceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What an entrance needs besides the settings of every child."""

    index: int = 0
    """Its number among the entrances."""
    host: str
    port: int
    limits: HttpLimits
    stop_grace_s: int
    """Time that requests get to end when the server stops, seconds."""
    tls: tuple[str, str] | None = None
    """Paths of the certificate and its key; None: HTTP without TLS."""
    trusted_proxies: tuple[str, ...] = ()


class Asked(msgspec.Struct, frozen=True, array_like=True, tag="asked"):
    """A request, without its body."""

    number: int
    method: str
    path: str
    raw_path: bytes
    query: bytes
    headers: Headers
    http_version: str
    scheme: str
    client: tuple[str, int] | None
    server: tuple[str, int | None] | None
    is_crowded: bool
    """Whether the entrance has too many open connections."""


class Received(msgspec.Struct, frozen=True, array_like=True, tag="received"):
    """The answer to a `Wanted`; it may also come without one if the client is gone."""

    number: int
    body: bytes = b""
    more: bool = False
    """Whether the body goes on."""
    is_gone: bool = False
    """Whether the client has left, so that nothing follows."""


class Written(msgspec.Struct, frozen=True, array_like=True, tag="written"):
    """The piece that asked for this was written, because the client keeps up with reading."""

    number: int


class Connected(msgspec.Struct, frozen=True, array_like=True, tag="connected"):
    """How many connections are open; the first one shows that the entrance is."""

    num: int


class Wanted(msgspec.Struct, frozen=True, array_like=True, tag="wanted"):
    """The application wants the next part of the body, or the news that the client has left."""

    number: int


class Started(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    """An answer begins."""

    number: int
    status: int
    headers: Headers


class Piece(msgspec.Struct, frozen=True, array_like=True, tag="piece"):
    """A part of the body of an answer."""

    number: int
    data: bytes
    more: bool
    """Whether the body goes on."""
    asks: bool = False
    """Whether a `Written` is wanted."""

    @property
    def is_plain(self) -> bool:
        """Whether it does nothing but add to the body."""
        return self.more and not self.asks and bool(self.data)


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The application has ended without a whole answer."""

    number: int


FromEntrance = Asked | Received | Written | Connected
ToEntrance = Wanted | Started | Piece | Failed


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """What an entrance says. Those of an incarnation that has died are dropped."""

    entrance: int
    incarnation: int
    messages: tuple[FromEntrance, ...]


read_frame = msgspec.msgpack.Decoder(Frame)
read_messages = msgspec.msgpack.Decoder(tuple[ToEntrance, ...])
encode = msgspec.msgpack.Encoder().encode
