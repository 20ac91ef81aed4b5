"""The other ranks of a model, as rank 0 sees them: their processes, what they say, and their end."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import TypeVar

from pagewood.engine.api import EngineConfig, Progress
from pagewood.engine.core.loop import RunnerLostError
from pagewood.engine.runner.ranks.cores import divided_cores
from pagewood.engine.runner.ranks.messages import (
    Begin,
    Close,
    Doing,
    Failed,
    FromRank,
    Loaded,
    Ready,
    Sizes,
    Spans,
    ToRank,
    receive_from_rank,
    send,
)
from pagewood.engine.runner.ranks.pulse import HEARTBEAT_S, Pulse
from pagewood.engine.runner.ranks.segment import MAX_RANKS, Segment, mapped, segment_bytes, shared_memory

_log = logging.getLogger(__name__)
_MODULE = "pagewood.engine.assembly.rank_process"
_CLOSE_S = 10.0
"""How long a rank may take to end."""
_LOOK_S = 0.2
"""How often a rank that waits for others reports what they do."""

Answer = TypeVar("Answer", Loaded, Ready, Spans)


class RankError(Exception):
    """A rank cannot be built; not the fault of the model or the configuration."""


class Group:
    """The ranks of a model. Invariant: when the group has ended, none of the processes that it has started lives.

    A group ends at `close`; when a process of it ends or gives no sign of life; and when ranks differ. Then nothing that
    waits for a rank goes on waiting, and all methods raise `RunnerLostError`.

    Args:
        config: of all ranks.
        count: R, at least 2; this process is rank 0.
        kv_memory: descriptors of the KV memory of ranks 1 to R - 1, which this process reads too; None: each has its own.
        heartbeat_s: how long a rank may be silent.
        module: what the processes of the other ranks run.
    """

    __slots__ = (
        "_answers", "_changed", "_doing", "_links", "_processes", "_pulse", "_reader", "cores", "count", "segment",
    )  # fmt: skip

    def __init__(
        self,
        config: EngineConfig,
        count: int,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        module: str = _MODULE,
    ) -> None:
        if not 2 <= count <= MAX_RANKS:
            raise ValueError(f"a group must have 2 to {MAX_RANKS} ranks, got {count}")
        descriptor = shared_memory(segment_bytes(count))
        self.count = count
        self.segment = Segment.in_memory(mapped(descriptor), count)
        divided = divided_cores(count)
        self.cores: Sequence[int] = divided[0]
        """Logical processors of this rank; empty: any."""
        self._links: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._changed = threading.Condition()
        self._answers: dict[tuple[int, type[FromRank]], FromRank] = {}
        """The last answer of each kind of each rank, until it is taken."""  # written by: _read, answers
        self._doing: dict[int, Doing] = {}
        """What each rank does at present."""  # written by: _read
        try:
            for rank in range(1, count):
                self._start(rank, module, descriptor)
                self.tell(rank, self._begin(config, rank, descriptor, divided[rank]))
        except BaseException:
            self._kill()
            raise
        finally:
            os.close(descriptor)
        self._pulse = Pulse(self.segment, 0, heartbeat_s=heartbeat_s, on_end=self._ended, lost=self._dead)
        self._reader = threading.Thread(target=self._read, name="ranks-reader", daemon=True)
        self._reader.start()

    def begin(self) -> None:
        """Note that all ranks are ready, so that from now on each must give signs of life."""
        self._pulse.begin()

    def check(self) -> None:
        """Raise if the group has ended.

        Raises:
            RunnerLostError: it has.
        """
        reason = self.segment.end_reason
        if reason is not None:
            raise RunnerLostError(reason)

    def tell(self, rank: int, message: ToRank) -> None:
        """Send a message to a rank; `RunnerLostError` if that is impossible."""
        try:
            send(self._links[rank - 1], message)
        except (OSError, ValueError) as error:
            self._lose(rank, error)

    def tell_all(self, message: ToRank) -> None:
        """Send a message to all other ranks."""
        for rank in range(1, self.count):
            self.tell(rank, message)

    def answers(self, kind: type[Answer], *, progress: Progress | None = None) -> list[Answer]:
        """Wait for an answer of each other rank, in their order.

        Args:
            kind: of the answer.
            progress: gets what the ranks do that have not answered.

        Raises:
            ValueError: the model or the configuration is wrong for a rank.
            RankError: a rank cannot be built.
            RunnerLostError: the group has ended.
        """
        found: list[Answer] = []
        for rank in range(1, self.count):
            while True:
                with self._changed:
                    failure = self._answers.get((rank, Failed))
                    answer = self._answers.pop((rank, kind), None)
                    if failure is None and answer is None:
                        self._changed.wait(_LOOK_S)
                if isinstance(failure, Failed):
                    raise (ValueError if failure.is_refusal else RankError)(failure.message)
                if isinstance(answer, kind):
                    found.append(answer)
                    break
                self.check()
                doing = self._doing.get(rank)
                if progress is not None and doing is not None:
                    progress(f"rank {rank}: {doing.what}", doing.done, doing.total)
        return found

    def agree(self, number: int) -> None:
        """Wait until all ranks have ended a step, and compare what they have computed.

        Args:
            number: of the step, from 1 on.

        Raises:
            RunnerLostError: they differ, or the group ends before that.
        """
        if not self.segment.wait_for_step(number):
            self.check()
        if (found := self.segment.differing(number)) is not None:
            rank, what = found
            self.segment.end(rank, f"rank {rank} has other {what} than rank 0 after step {number}")
            self.check()

    def end(self, rank: int, reason: str) -> None:
        """End the group because of a rank."""
        self.segment.end(rank, reason)

    def close(self) -> None:
        """End all ranks after what they have been given; kill those that take too long. A second call does nothing."""
        if self.segment.end_reason is None:
            for link in self._links:
                with contextlib.suppress(OSError, ValueError):
                    send(link, Close())
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_CLOSE_S)
            self.segment.end(0, "the group is closed")
        self._pulse.stop()
        self._kill()
        self._reader.join()

    def pids(self) -> list[int]:
        """Return the process ids of the other ranks, in their order."""
        return [process.pid for process in self._processes]

    def _begin(self, config: EngineConfig, rank: int, descriptor: int, cores: list[int]) -> Begin:
        return Begin(
            config=config,
            rank=rank,
            count=self.count,
            segment=descriptor,
            kv_memory=None,
            search_path=[one for one in sys.path if one],
            cores=cores,
        )

    def _start(self, rank: int, module: str, descriptor: int) -> None:
        """Start the process of a rank, with nothing of this process but the connection and the shared memory."""
        own, other = socket.socketpair()
        self._links.append(Connection(own.detach()))
        with other:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(other.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(other.fileno(), descriptor),
                start_new_session=True,  # the terminal's Ctrl-C is for this process
            )
        self._processes.append(process)
        _log.info("rank %d: process %d", rank, process.pid)

    def _read(self) -> None:
        """Note what the ranks say, until none of them can say more."""
        links = {link: rank for rank, link in enumerate(self._links, 1)}
        while links:
            for link in wait(list(links)):
                assert isinstance(link, Connection)
                rank = links[link]
                try:
                    message = receive_from_rank(link)
                except (EOFError, OSError, ValueError):
                    del links[link]
                    continue
                with self._changed:
                    if isinstance(message, Doing):
                        self._doing[rank] = message
                    else:
                        self._answers[rank, type(message)] = message
                    self._changed.notify_all()

    def _dead(self) -> tuple[int, str] | None:
        """Return a rank whose process has ended, and how."""
        for rank, process in enumerate(self._processes, 1):
            if (code := process.poll()) is not None:
                return rank, f"the process of rank {rank} has ended with code {code}"
        return None

    def _lose(self, rank: int, error: Exception) -> None:
        code = self._processes[rank - 1].poll() if rank <= len(self._processes) else None
        how = f"cannot be reached: {error}" if code is None else f"has ended with code {code}"
        self.segment.end(rank, f"the process of rank {rank} {how}")
        raise RunnerLostError(self.segment.end_reason or how) from error

    def _ended(self) -> None:
        """Kill what is left of the group; on the thread of the pulse."""
        _log.error("the group of %d ranks has ended: %s", self.count, self.segment.end_reason)
        self._kill()
        with self._changed:
            self._changed.notify_all()

    def _kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
