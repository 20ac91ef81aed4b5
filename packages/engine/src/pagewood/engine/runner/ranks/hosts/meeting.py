"""How the nodes of a group find each other: a connection for messages to node 0, and one for frames between any two.

Node 0 listens until all are there, then says which generation begins, and where each node listens for those with higher
numbers. What belongs to another generation is refused, so a node that was late for the last group cannot disturb
this one. If a node is lost before all are connected, the others come again.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from pagewood.engine.api import Progress
from pagewood.engine.node_address import Address
from pagewood.engine.runner.ranks.hosts.door import Door, Guest, dial
from pagewood.engine.runner.ranks.hosts.identity import Identity
from pagewood.engine.runner.ranks.hosts.messages import (
    MOST_BYTES,
    Connected,
    OfNode,
    Refused,
    Waiting,
    Welcome,
    decode,
    encode,
)
from pagewood.engine.runner.ranks.hosts.secret import WrongSecretError
from pagewood.engine.runner.ranks.link import Link, WrongMessageError

_log = logging.getLogger(__name__)

_LOOK_S = 0.2
_CONNECT_S = 10.0
"""How long it may take until all nodes are connected, once all are there."""
_AGAIN_S = 0.3
"""How long a node waits before it looks for node 0 again."""


class RefusedError(ValueError):
    """Another node has refused this one, and would do it again."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Meeting:
    """The connections of a node with all others."""

    generation: int
    links: dict[int, Link]
    """Node -> connection for messages: of node 0 to each other one, of the others to node 0."""
    streams: dict[int, socket.socket]
    """Node -> connection for frames."""
    hosts: dict[int, str]
    """Node -> its address."""

    def close(self) -> None:
        """Close all connections."""
        for one in (*self.links.values(), *self.streams.values()):
            one.close()


def gather(identity: Identity, progress: Progress | None) -> Meeting:
    """Wait for all other nodes, on node 0.

    Args:
        identity: of node 0.
        progress: is told which nodes are missing, several times in a second; what it raises ends the wait.

    Raises:
        OSError: the port cannot be had.
    """
    address, num_others = identity.address, identity.num_nodes - 1
    with Door(address.host, address.port, identity.secret) as door:
        while True:
            guests = _awaited(door, identity, progress)
            generation = time.time_ns()
            where = [("", 0), *((guests[node].host, guests[node].hello.port) for node in range(1, num_others + 1))]
            streams: dict[int, socket.socket] = {}
            ends_s = time.monotonic() + _CONNECT_S
            try:
                for guest in guests.values():
                    guest.link().send(encode(Welcome(generation=generation, addresses=where)))
                _take_streams(door, range(1, num_others + 1), generation, streams, ends_s)
                for guest in guests.values():
                    _expect(guest.link(), Connected)
            except (EOFError, OSError, WrongMessageError) as error:
                _log.warning("a node was lost while nodes met (%s); they meet again", error or type(error).__name__)
                for one in (*streams.values(), *(guest.connection for guest in guests.values())):
                    one.close()
                continue
            for guest in guests.values():
                guest.connection.settimeout(None)
            _log.info(
                "nodes have met: %s",
                ", ".join(f"node {node} at {guest.host}" for node, guest in sorted(guests.items())),
            )
            return Meeting(
                generation=generation,
                links={node: guest.link() for node, guest in guests.items()},
                streams=streams,
                hosts={node: guest.host for node, guest in guests.items()},
            )


def _awaited(door: Door, identity: Identity, progress: Progress | None) -> dict[int, Guest]:
    """Return a connection of each other node, all of which fit."""
    guests: dict[int, Guest] = {}
    try:
        while True:
            missing = [node for node in range(1, identity.num_nodes) if node not in guests]
            if progress is not None:
                progress(
                    f"waiting for node {', node '.join(map(str, missing))}"
                    if missing
                    else "connecting with other nodes",
                    len(guests),
                    identity.num_nodes - 1,
                )
            guest = door.next(timeout_s=_LOOK_S) if missing else None
            if guest is not None:
                node = guest.hello.node
                if guest.hello.generation is not None:
                    guest.refuse("its group has ended", is_final=False)
                elif (objection := identity.objection(guest.hello)) is not None:
                    guest.refuse(objection, is_final=True)
                else:
                    if node in guests:
                        guests[node].refuse("it has come again", is_final=False)
                    _log.info("node %d has come, from %s", node, guest.host)
                    guests[node] = guest
            for node, one in list(guests.items()):  # those that have gone do not count
                try:
                    one.link().send(encode(Waiting(missing=[other for other in missing if other not in guests])))
                except OSError:
                    _log.warning("node %d has gone again", node)
                    guests.pop(node).connection.close()
            if not missing and len(guests) == identity.num_nodes - 1:
                return guests
    except BaseException:
        for one in guests.values():
            one.connection.close()
        raise


def _take_streams(door: Door, nodes: range, generation: int, streams: dict[int, socket.socket], ends_s: float) -> None:
    """Take the connection for frames of each of some nodes.

    Raises:
        TimeoutError: one has not come.
    """
    while missing := [node for node in nodes if node not in streams]:
        guest = door.next(timeout_s=max(0.001, ends_s - time.monotonic()))
        if guest is None:
            raise TimeoutError(f"node {', node '.join(map(str, missing))} does not connect")
        node = guest.hello.node
        if guest.hello.generation != generation:
            guest.refuse("another group begins", is_final=False)
        elif node not in missing:
            guest.refuse(f"node {node} is not awaited here", is_final=False)
        else:
            guest.link().send(encode(Connected()))
            streams[node] = guest.connection


def _expect(link: Link, kind: type[OfNode]) -> None:
    found = decode(link.receive())
    if isinstance(found, Refused):
        raise WrongMessageError(found.reason)
    if not isinstance(found, kind):
        raise WrongMessageError(f"a node must say {kind.__name__}, got {type(found).__name__}")


def join(identity: Identity, has_stopped: Callable[[], bool]) -> Meeting | None:
    """Wait for node 0 and all others, on another node.

    Args:
        identity: of this node.
        has_stopped: whether to wait no more.

    Returns:
        The connections; None: `has_stopped` has said so.

    Raises:
        RefusedError: this node cannot be a part of the group.
        WrongSecretError: node 0 has another secret.
    """
    address, told = identity.address, ""
    while not has_stopped():
        try:
            return _joined(identity, has_stopped)
        except (WrongSecretError, RefusedError):
            raise
        except (EOFError, OSError, WrongMessageError) as error:
            why = f"{type(error).__name__}: {error}"
            if why != told:
                told = why
                _log.info("waiting for node 0 at %s port %d (%s)", address.host, address.port, why)
            time.sleep(_AGAIN_S)
    return None


def _joined(identity: Identity, has_stopped: Callable[[], bool]) -> Meeting | None:
    """Meet the others once; see `join`, and what else `dial` raises."""
    if identity.node == identity.num_nodes - 1:
        return _met(identity, None, has_stopped)
    with Door(own_host(identity.address), 0, identity.secret) as door:
        return _met(identity, door, has_stopped)


def own_host(address: Address) -> str:
    """Return the address of this host that others reach it by, if node 0 does; nothing is sent."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as one:
        one.connect((address.host, address.port))
        return str(one.getsockname()[0])


def _met(identity: Identity, door: Door | None, has_stopped: Callable[[], bool]) -> Meeting | None:
    node, address = identity.node, identity.address
    hello = identity.hello(generation=None, port=0 if door is None else door.port)
    open_ones = [dial(address.host, address.port, identity.secret, hello)]
    streams: dict[int, socket.socket] = {}
    try:
        link = Link(open_ones[0], most_bytes=MOST_BYTES)
        welcome = _awaited_welcome(link, has_stopped)
        if welcome is not None:
            ends_s = time.monotonic() + _CONNECT_S
            hosts = {other: host for other, (host, _) in enumerate(welcome.addresses) if other != node}
            hosts[0] = address.host
            for other in range(node):
                host, port = welcome.addresses[other] if other else (address.host, address.port)
                own = identity.hello(generation=welcome.generation)
                streams[other] = dial(host, port, identity.secret, own)
                open_ones.append(streams[other])
                _expect(Link(streams[other], most_bytes=MOST_BYTES), Connected)
            if door is not None:
                later = range(node + 1, identity.num_nodes)
                _take_streams(door, later, welcome.generation, streams, ends_s)
            link.send(encode(Connected()))
            open_ones[0].settimeout(None)
            return Meeting(generation=welcome.generation, links={0: link}, streams=streams, hosts=hosts)
    except BaseException:
        for one in (*open_ones, *streams.values()):
            one.close()
        raise
    open_ones[0].close()
    return None


def _awaited_welcome(link: Link, has_stopped: Callable[[], bool]) -> Welcome | None:
    told: list[int] | None = None
    while not has_stopped():
        match decode(link.receive()):
            case Waiting(missing=missing):
                if missing != told:
                    told = missing
                    _log.info("node 0 is there; nodes that are missing: %s", ", ".join(map(str, missing)) or "none")
            case Refused(reason=reason, is_final=is_final):
                if is_final:
                    raise RefusedError(reason)
                raise WrongMessageError(reason)
            case Welcome() as welcome:
                return welcome
            case other:
                raise WrongMessageError(f"node 0 must say who is missing, got {type(other).__name__}")
    return None
