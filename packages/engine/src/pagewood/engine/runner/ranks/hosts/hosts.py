"""The ranks on other hosts, as rank 0 sees them."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterable
from functools import partial

from pagewood.engine.runner.ranks.hosts.meeting import Meeting
from pagewood.engine.runner.ranks.hosts.messages import Exited, OfRank, Started, ToRanks, decode, encode
from pagewood.engine.runner.ranks.hosts.relay import LAST_WORDS_S, Relay
from pagewood.engine.runner.ranks.link import Link, WrongMessageError
from pagewood.engine.runner.ranks.segment import Segment
from pagewood.engine.runner.ranks.stage_memory import StageMemory

_LOST_CODE = -1
"""Exit code of a rank whose node cannot be asked any more."""


class RemoteRank:
    """The process of a rank on another host; satisfies `group.RankProcess`.

    Args:
        shut: ends the connection to its node, which then ends its ranks.
    """

    __slots__ = ("_code", "_has_ended", "_shut", "pid")

    def __init__(self, shut: Callable[[], None]) -> None:
        self._shut = shut
        self._has_ended = threading.Event()
        self._code: int | None = None  # written by: note_end
        self.pid = 0
        """Its id on its host; 0: it has not been started."""  # written by: hosts

    def note_end(self, code: int) -> None:
        """Note its exit code, once."""
        if self._code is None:
            self._code = code
        self._has_ended.set()

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it takes longer.
        """
        if not self._has_ended.wait(timeout):
            raise subprocess.TimeoutExpired("a rank on another host", timeout or 0.0)
        assert self._code is not None
        return self._code

    def kill(self) -> None:
        """End it, with all ranks of its node."""
        self._shut()
        self.note_end(_LOST_CODE)


class _Node:
    """Another node: what rank 0 tells it, from any thread."""

    __slots__ = ("_link", "name", "number")

    def __init__(self, number: int, host: str, link: Link) -> None:
        self.number = number
        self.name = f"node {number} ({host})"
        self._link = link

    def tell(self, message: ToRanks) -> None:
        """Send a message; `OSError` if that is impossible."""
        self._link.send(encode(message))

    def receive(self) -> object:
        return decode(self._link.receive())

    def shut(self) -> None:
        self._link.shut()

    def close(self) -> None:
        self._link.close()


class Hosts:
    """The other nodes of a group. Invariant: each has `per_node` ranks, in the order of nodes; node 0 has the first.

    Args:
        meeting: of node 0 with the others; its connections are closed by this object.
        per_node: ranks of a node.
        heartbeat_s: how long a node may be silent.
    """

    __slots__ = ("_heartbeat_s", "_is_closing", "_meeting", "_nodes", "_readers", "_relays", "per_node", "processes")

    def __init__(self, meeting: Meeting, per_node: int, *, heartbeat_s: float) -> None:
        self._meeting = meeting
        self._heartbeat_s = heartbeat_s
        self.per_node = per_node
        self._nodes = [_Node(number, meeting.hosts[number], meeting.links[number]) for number in sorted(meeting.links)]
        self.processes = [RemoteRank(partial(self._shut, one)) for one in self._nodes for _ in range(per_node)]
        """Processes of the ranks of other nodes, in the order of ranks."""
        self._relays: list[Relay] = []  # written by: begin
        self._readers: list[threading.Thread] = []  # written by: begin
        self._is_closing = False  # written by: close

    def begin(self, segment: Segment, stages: StageMemory | None, hear: Callable[[int, bytes], None]) -> None:
        """Let the ranks of all nodes share a segment.

        Args:
            segment: of node 0.
            stages: what stages share there; None: the model has one.
            hear: gets (rank, message) of ranks of other nodes, each node on a thread.
        """
        own = range(self.per_node)
        for node in self._nodes:
            stream = self._meeting.streams[node.number]
            theirs = self._ranks(node.number)
            self._relays.append(Relay(segment, stages, own, theirs, node.name, stream, heartbeat_s=self._heartbeat_s))
            thread = threading.Thread(target=self._read, args=(node, segment, hear), name="node", daemon=True)
            self._readers.append(thread)
            thread.start()

    def tell(self, rank: int, message: bytes) -> None:
        """Send a message to a rank of another node; `OSError` if that is impossible."""
        node = self._nodes[rank // self.per_node - 1]
        node.tell(ToRanks(generation=self._meeting.generation, rank=rank, message=message))

    def tell_all(self, message: bytes) -> None:
        """Send a message to all ranks of other nodes, to each node once; `OSError` if that is impossible."""
        for node in self._nodes:
            node.tell(ToRanks(generation=self._meeting.generation, rank=None, message=message))

    def place(self, rank: int) -> str:
        """Return the name of the node of a rank."""
        number = rank // self.per_node
        return f"node {number}" if number == 0 else self._nodes[number - 1].name

    def _shut(self, node: _Node) -> None:
        """End the connection to a node of a group that has ended; what waits for it waits no longer."""
        for relay in self._relays:
            relay.wait_until_told()
        node.shut()

    def close(self) -> None:
        """Tell all nodes that the group has ended, which it must have, and close the connections."""
        self._is_closing = True
        for relay in self._relays:
            relay.close()
        for node in self._nodes:
            node.shut()
        for reader in self._readers:
            reader.join()
        for node in self._nodes:
            node.close()

    def _ranks(self, number: int) -> range:
        return range(number * self.per_node, (number + 1) * self.per_node)

    def _read(self, node: _Node, segment: Segment, hear: Callable[[int, bytes], None]) -> None:
        """Note what a node says, until it can say no more."""
        ranks = self._ranks(node.number)
        how = "has closed its connection"
        try:
            while True:
                match node.receive():
                    case OfRank(rank=rank, message=message) if rank in ranks:
                        hear(rank, message)
                    case Started(rank=rank, pid=pid) if rank in ranks:
                        self.processes[rank - self.per_node].pid = pid
                    case Exited(rank=rank, code=code) if rank in ranks:
                        self.processes[rank - self.per_node].note_end(code)
                    case other:
                        raise WrongMessageError(f"unexpected {type(other).__name__}")
        except WrongMessageError as error:
            how = f"has sent a wrong message: {error}"
        except (EOFError, OSError):
            pass
        if not self._is_closing and segment.wait_for_end(LAST_WORDS_S) is None:  # the relay may know better
            segment.end(ranks.start, f"{node.name} {how}")
        self._note_ends(ranks)

    def _note_ends(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self.processes[rank - self.per_node].note_end(_LOST_CODE)
