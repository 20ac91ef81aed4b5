"""What nodes tell each other beside the frames of their ranks: MessagePack, once both ends have proved the secret."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from pagewood.engine.runner.ranks.link import WrongMessageError


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message of the end that has dialled."""

    node: int
    num_nodes: int
    version: str
    """Version of the program, with the kind of the processor."""
    generation: int | None
    """The group for whose frames this connection is; None: the node waits for the next group."""
    port: int = 0
    """Where nodes with higher numbers dial this one."""
    model: str = ""
    """Digest of all files of the model, and of the drafter's, in hex."""
    config: dict[str, str] = {}  # msgspec copies it
    """Field of the configuration -> its value as JSON, for those that are the same on all nodes."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The node cannot be a part of the group."""

    reason: str
    is_final: bool
    """Whether it is useless to come again."""


class Waiting(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Other nodes are missing."""

    missing: list[int]


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All nodes are there, so a group begins."""

    generation: int
    addresses: list[tuple[str, int]]
    """Host and port of each node; those of node 0 are not used."""


class Connected(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The connection is accepted; from a node to node 0: it is connected with all others."""


class ToRanks(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A message of rank 0 to ranks of a node."""

    generation: int
    rank: int | None
    """None: all of the node."""
    message: bytes
    """See `ranks.messages.ToRank`."""


class OfRank(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A message of a rank to rank 0."""

    rank: int
    message: bytes
    """See `ranks.messages.FromRank`."""


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank has a process."""

    rank: int
    pid: int
    """Its id on its host."""


class Exited(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The process of a rank has ended."""

    rank: int
    code: int


OfNode: TypeAlias = Hello | Refused | Waiting | Welcome | Connected | ToRanks | OfRank | Started | Exited

MOST_BYTES = 1 << 28
"""Limit of a message between nodes that have met; a batch with masks of large vocabularies has some millions."""
MOST_HELLO_BYTES = 1 << 20
"""Limit of a message between nodes that meet."""

encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(OfNode)


def decode(data: bytes | bytearray) -> OfNode:
    """Return a message; `WrongMessageError` if it is none."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise WrongMessageError(f"a node has sent no message: {error}") from error
