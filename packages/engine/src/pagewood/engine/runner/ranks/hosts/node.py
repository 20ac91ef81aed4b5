"""What a node other than 0 does while a group lives: it starts its ranks, and passes messages on."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from msgspec.structs import replace

from pagewood.engine.api import EngineConfig
from pagewood.engine.runner.ranks.cores import divided_cores
from pagewood.engine.runner.ranks.group import RankProcess, Spawn
from pagewood.engine.runner.ranks.hosts.meeting import Meeting
from pagewood.engine.runner.ranks.hosts.messages import Exited, OfNode, OfRank, Started, ToRanks, decode, encode
from pagewood.engine.runner.ranks.hosts.relay import LAST_WORDS_S, Relay
from pagewood.engine.runner.ranks.link import Link, WrongMessageError
from pagewood.engine.runner.ranks.messages import Begin, to_rank
from pagewood.engine.runner.ranks.messages import encode as encode_to_rank
from pagewood.engine.runner.ranks.rank_names import RankNames
from pagewood.engine.runner.ranks.segment import Segment, mapped, segment_bytes, shared_memory
from pagewood.engine.runner.ranks.stage_memory import StageMemory, stage_bytes

_log = logging.getLogger(__name__)

_LOOK_S = 0.1
_LAST_LOOKS = 50
"""How often a node looks whether node 0 has closed the group, after its ranks have ended."""


class NodeGroup:
    """A node's part of a group. Invariant: when it has been closed, none of the processes that it has started lives.

    Args:
        config: of this node, resolved, with the threads of all its ranks together.
        meeting: its connections, which this object closes.
        heartbeat_s: how long another node may be silent.
        spawn: starts a rank.
    """

    __slots__ = (
        "_config", "_cores", "_descriptor", "_links", "_meeting", "_names", "_own", "_processes", "_reader", "_relays",
        "_segment", "_spawn", "_speakers",
    )  # fmt: skip

    def __init__(self, config: EngineConfig, meeting: Meeting, *, heartbeat_s: float, spawn: Spawn) -> None:
        count, per_node, num_stages = config.num_ranks, config.ranks_per_node, config.pipeline_parallel_size
        self._config = config
        self._meeting = meeting
        self._spawn = spawn
        self._own = range(config.node_rank * per_node, (config.node_rank + 1) * per_node)
        self._cores = divided_cores(per_node)
        self._names = RankNames(count, num_stages)
        size = segment_bytes(count)
        self._descriptor = shared_memory(size + stage_bytes(count, num_stages))
        memory = mapped(self._descriptor)
        self._segment = Segment.in_memory(memory, count)
        stages = None if num_stages == 1 else StageMemory.in_memory(memory[size:], self._segment, num_stages)
        self._links: dict[int, Link] = {}
        """Links of the ranks that have been started, by rank."""  # contents written by: _start
        self._processes: dict[int, RankProcess] = {}
        """Likewise."""  # contents written by: _start
        self._speakers: list[threading.Thread] = []  # contents written by: _start
        self._relays = [
            Relay(
                self._segment,
                stages,
                self._own,
                range(node * per_node, (node + 1) * per_node),
                f"node {node} ({meeting.hosts[node]})",
                stream,
                heartbeat_s=heartbeat_s,
            )
            for node, stream in sorted(meeting.streams.items())
        ]
        self._reader = threading.Thread(target=self._read, name="node-reader", daemon=True)
        self._reader.start()

    def wait(self, has_stopped: Callable[[], bool]) -> str:
        """Wait until the group ends; return why.

        Args:
            has_stopped: whether this node is to end it.
        """
        codes: dict[int, int] = {}
        num_looks = 0
        while (reason := self._segment.wait_for_end(_LOOK_S)) is None:
            for rank, process in list(self._processes.items()):
                if rank not in codes and (code := process.poll()) is not None:
                    codes[rank] = code
                    self._speakers[rank - self._own.start].join()  # its last words come first
                    self._tell(Exited(rank=rank, code=code))
            if has_stopped():
                self._segment.end(self._own.start, f"node {self._config.node_rank} has been stopped")
            if len(codes) == len(self._own):
                num_looks += 1
                if num_looks > _LAST_LOOKS:
                    self._segment.end(self._own.start, f"all ranks of node {self._config.node_rank} have ended")
        return reason

    def close(self) -> None:
        """End what is left of the group on this node."""
        self._segment.end(self._own.start, f"node {self._config.node_rank} has left")
        for relay in self._relays:
            relay.close()
        (to_node_0,) = self._meeting.links.values()
        to_node_0.shut()
        for process in list(self._processes.values()):  # a reader that sends to one of them waits no longer then
            process.kill()
            process.wait()
        self._reader.join()
        for process in self._processes.values():  # one that was started meanwhile
            process.kill()
            process.wait()
        for thread in self._speakers:
            thread.join()
        for link in (*self._links.values(), to_node_0):
            link.close()
        os.close(self._descriptor)

    def _tell(self, message: OfNode) -> None:
        (to_node_0,) = self._meeting.links.values()
        with suppress(OSError):  # the reader notices that it has ended
            to_node_0.send(encode(message))

    def _read(self) -> None:
        """Pass on what rank 0 says, until it says no more."""
        (from_node_0,) = self._meeting.links.values()
        try:
            while True:
                message = decode(from_node_0.receive())
                if not isinstance(message, ToRanks):
                    raise WrongMessageError(f"unexpected {type(message).__name__}")
                if message.generation != self._meeting.generation:
                    raise WrongMessageError(f"generation must be {self._meeting.generation}, got {message.generation}")
                for rank in self._own if message.rank is None else (message.rank,):
                    self._pass_on(rank, message.message)
        except (EOFError, OSError):
            self._segment.wait_for_end(LAST_WORDS_S)  # the relay may know better
            self._segment.end(0, f"node 0 ({self._meeting.hosts[0]}) has closed its connection")
        except Exception as error:
            _log.exception("node %d cannot follow node 0", self._config.node_rank)
            self._segment.end(self._own.start, f"node {self._config.node_rank} cannot follow node 0: {error}")

    def _pass_on(self, rank: int, message: bytes) -> None:
        link = self._links.get(rank)
        if link is None:
            begin = to_rank(message)
            if not isinstance(begin, Begin) or rank not in self._own or begin.rank != rank:
                raise WrongMessageError(f"rank {rank} must begin first, got {type(begin).__name__}")
            self._start(begin)
            return
        with suppress(OSError):  # it has ended, which is told in another way
            link.send(message)

    def _start(self, begin: Begin) -> None:
        """Start a rank, with what belongs to this host in place of what belongs to that of rank 0."""
        link, other = Link.pair()
        with other:
            process = self._spawn(self._names.label(begin.rank), other.fileno(), [self._descriptor])
        self._links[begin.rank], self._processes[begin.rank] = link, process
        link.send(
            encode_to_rank(
                replace(
                    begin,
                    config=self._config,
                    segment=self._descriptor,
                    search_path=[one for one in sys.path if one],
                    cores=[] if begin.port is not None else self._cores[begin.rank - self._own.start],
                )
            )
        )
        self._tell(Started(rank=begin.rank, pid=process.pid))
        _log.info("%s: process %d", self._names[begin.rank], process.pid)
        speaker = threading.Thread(target=self._speak, args=(begin.rank, link), name="rank-reader", daemon=True)
        self._speakers.append(speaker)
        speaker.start()

    def _speak(self, rank: int, link: Link) -> None:
        """Pass on what a rank says, until it has ended."""
        with suppress(EOFError, OSError):
            while True:
                self._tell(OfRank(rank=rank, message=bytes(link.receive())))
