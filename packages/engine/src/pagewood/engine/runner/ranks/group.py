"""The other ranks of a model, as rank 0 sees them: their processes, what they say, and their end."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from pagewood.engine.api import EngineConfig, Progress
from pagewood.engine.core.loop import RunnerLostError
from pagewood.engine.runner.ranks.cores import divided_cores
from pagewood.engine.runner.ranks.joint_progress import JointProgress
from pagewood.engine.runner.ranks.link import Link
from pagewood.engine.runner.ranks.messages import (
    AdapterRead,
    Answer,
    Begin,
    Close,
    Doing,
    Failed,
    FromRank,
    MovePages,
    PagesMoved,
    Ready,
    Said,
    Spans,
    ToRank,
    encode,
    from_rank,
    send,
)
from pagewood.engine.runner.ranks.pulse import HEARTBEAT_S, LOADING_HEARTBEAT_S, Pulse
from pagewood.engine.runner.ranks.rank_names import RankNames
from pagewood.engine.runner.ranks.segment import MAX_RANKS, Segment, mapped, segment_bytes, shared_memory
from pagewood.engine.runner.ranks.stage_memory import StageMemory, stage_bytes

if TYPE_CHECKING:
    from pagewood.engine.runner.ranks.hosts.hosts import Hosts

_log = logging.getLogger(__name__)
_MODULE = "pagewood.engine.assembly.rank_process"
_CLOSE_S = HEARTBEAT_S
"""How long all ranks may take to end."""
_LOOK_S = 0.2
"""How often a rank that waits for others reports what they do."""


class RankProcess(Protocol):
    """The process of a rank, as `subprocess.Popen` is one."""

    @property
    def pid(self) -> int:
        """Its id."""
        ...

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...


Spawn = Callable[[str, int, Sequence[int]], RankProcess]
"""(label of the rank, descriptor of its connection, descriptors of memory) -> its process, which inherits these."""


def spawn(label: str, connection: int, descriptors: Sequence[int]) -> RankProcess:
    """Start the process of a rank, with nothing of this process but its connection and the shared memory."""
    return subprocess.Popen(
        [sys.executable, "-m", _MODULE, label, str(connection)],
        stdin=subprocess.DEVNULL,
        pass_fds=(connection, *descriptors),
        start_new_session=True,  # the terminal's Ctrl-C is for this process
    )


class Group:
    """The ranks of a model. Invariant: when the group has ended, none of the processes that it has started lives.

    A group ends at `close`; when a process of it ends or gives no sign of life; and when ranks differ. Then nothing
    that waits for a rank goes on waiting, and methods that need the others raise `RunnerLostError`.

    Args:
        config: of all ranks.
        count: R, at least 2; this process is rank 0.
        shares_kv: whether this process reads and writes the KV memory of all ranks of this host.
        cuts: first layer of each stage but the first one; empty: the model is not cut into stages.
        port: where ranks on devices meet, which run on any cores; None: ranks compute on cores, which are divided.
        heartbeat_s: how long a rank may be silent.
        loading_s: how long a rank may be silent before it is ready.
        hosts: the nodes that the last ranks are on, which this object closes; None: all ranks are on this host.
        progress: gets reports of what all ranks do until they are ready.
        spawn: starts the other ranks of this host.
    """

    __slots__ = (
        "_answers", "_at_end", "_changed", "_hosts", "_links", "_moved", "_names", "_processes", "_progress", "_pulse",
        "_reader", "_to_show", "cores", "count", "kv_memory", "num_here", "segment", "stages",
    )  # fmt: skip

    def __init__(
        self,
        config: EngineConfig,
        count: int,
        *,
        shares_kv: bool = False,
        cuts: Sequence[int] = (),
        port: int | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        loading_s: float = LOADING_HEARTBEAT_S,
        hosts: Hosts | None = None,
        progress: Progress | None = None,
        spawn: Spawn = spawn,
    ) -> None:
        if not 2 <= count <= MAX_RANKS:
            raise ValueError(f"a group must have 2 to {MAX_RANKS} ranks, got {count}")
        num_stages, size = 1 + len(cuts), segment_bytes(count)
        descriptor = shared_memory(size + stage_bytes(count, num_stages))
        self.count = count
        self.num_here = count if hosts is None else hosts.per_node
        """Ranks of this host."""
        self._hosts = hosts
        self._names = RankNames(count, num_stages, self.num_here)
        memory = mapped(descriptor)
        self.segment = Segment.in_memory(memory, count)
        self.stages: StageMemory | None = None
        """What stages share; None: there is one."""
        if num_stages > 1:
            self.stages = StageMemory.in_memory(memory[size:], self.segment, num_stages)
        anywhere: list[int] = []
        divided = divided_cores(self.num_here) if port is None else [anywhere] * count
        self.cores: Sequence[int] = divided[0]
        """Logical processors of this rank; empty: any."""
        self.kv_memory: list[int] = []
        """Descriptors of the KV memory of the other ranks of this host, if this process shares it; for ranks on
        devices, of one memory of the host that all of them copy to and from."""
        for rank in range(1, self.num_here if shares_kv else 1):
            self.kv_memory.append(shared_memory(0) if port is None or rank == 1 else os.dup(self.kv_memory[0]))
        self._links: list[Link] = []
        self._processes: list[RankProcess] = []
        self._changed = threading.Condition()
        self._answers: dict[tuple[int, type[FromRank], int], FromRank] = {}
        """The last answer of each kind of each rank, by the number of an adapter, otherwise 0, until it is taken."""
        # contents written by: _hear, _answer
        self._moved: dict[tuple[int, int], PagesMoved] = {}
        """Ends of copies by rank and number, until they are taken."""  # contents written by: _hear, move_pages
        self._progress = JointProgress(self._names)
        self._to_show = progress
        self._at_end: Callable[[], None] | None = None  # written by: at_end
        try:
            if hosts is not None:
                hosts.begin(self.segment, self.stages, self._hear)
            for rank in range(1, count):
                kv_memory = self.kv_memory[rank - 1] if rank <= len(self.kv_memory) else None
                if rank < self.num_here:
                    self._start(rank, spawn, [descriptor] if kv_memory is None else [descriptor, kv_memory])
                elif hosts is not None:
                    self._processes.append(hosts.processes[rank - self.num_here])
                self.tell(
                    rank,
                    Begin(
                        config=config,
                        rank=rank,
                        count=count,
                        segment=descriptor,
                        beats_at=Segment.beats_at(rank, count),
                        kv_memory=kv_memory,
                        search_path=[one for one in sys.path if one],
                        cores=divided[rank] if rank < self.num_here else [],
                        cuts=list(cuts),
                        port=port,
                        log_level=logging.getLogger("pagewood").getEffectiveLevel(),
                    ),
                )
        except BaseException:
            self._kill()
            if hosts is not None:
                hosts.close()
            raise
        finally:
            os.close(descriptor)
        self._pulse = Pulse(
            self.segment, 0, heartbeat_s=heartbeat_s, loading_s=loading_s, on_end=self._ended, lost=self._dead
        )
        self._reader = threading.Thread(target=self._read, name="ranks-reader", daemon=True)
        self._reader.start()

    def at_end(self, call: Callable[[], None]) -> None:
        """Call this once the group has lost a rank, on another thread, after the other ranks have been killed."""
        self._at_end = call

    def wait_until_ready(self) -> None:
        """Wait until all ranks are ready, as rank 0 is; from then on, a silent rank is lost sooner.

        Raises:
            ValueError: see `answers`.
            RunnerLostError: likewise.
        """
        self.progress("ready", 1, 1)
        self.answers(Ready)
        self._pulse.begin()

    def check(self) -> None:
        """Raise if the group has ended.

        Raises:
            RunnerLostError: it has.
        """
        if self.segment.end_reason is not None:
            raise RunnerLostError(self._why())

    def tell(self, rank: int, message: ToRank) -> None:
        """Send a message to a rank; `RunnerLostError` if that is impossible."""
        try:
            if rank < self.num_here or self._hosts is None:
                send(self._links[rank - 1], message)
            else:
                self._hosts.tell(rank, encode(message))
        except (OSError, ValueError) as error:
            self._lose(rank, error)

    def tell_all(self, message: ToRank) -> None:
        """Send a message to all other ranks."""
        with self._pulse.awaiting():  # a rank that is stopped takes no more
            self._tell_hosts(message)  # theirs has the longer way
            for rank in range(1, self.num_here):
                self.tell(rank, message)

    def _tell_hosts(self, message: ToRank) -> None:
        """Send a message to all ranks of other hosts."""
        if self._hosts is not None:
            try:
                self._hosts.tell_all(encode(message))
            except OSError as error:
                self._lose(self.num_here, error)

    def move_pages(self, message: MovePages, own: Callable[[], None], *, ranks: range) -> list[PagesMoved]:
        """Let ranks copy pages while `own` does so here; return their answers in order. Thread-safe.

        Args:
            message: what to copy.
            own: what this process does meanwhile.
            ranks: which copy.

        Raises:
            RunnerLostError: the group has ended.
        """
        awaited = [(one, message.number) for one in ranks]
        with self._pulse.awaiting():
            if ranks == range(self.num_here, self.count):
                self._tell_hosts(message)
            else:
                for rank in ranks:
                    self.tell(rank, message)
            try:
                own()
            finally:  # no rank uses the pages afterwards
                with self._changed:
                    while self.segment.end_reason is None and not all(one in self._moved for one in awaited):
                        self._changed.wait(_LOOK_S)
                    answers = [self._moved.pop(one, None) for one in awaited]
        self.check()
        return [one for one in answers if one is not None]

    def progress(self, what: str, done: int, total: int) -> None:
        """Note what rank 0 does, and report what all ranks do; a `Progress`.

        Raises:
            ValueError: the model or the configuration is wrong for a rank.
            RunnerLostError: the group has ended, so rank 0 would load in vain.
        """
        if self.segment.end_reason is not None:
            self._reader.join()  # the last words of the ranks may be on their way
            for rank in range(1, self.count):
                self._raise_failure(rank)
        self.check()
        with self._changed:
            self._progress.note(0, Doing(what=what, done=done, total=total))
        self._report()

    def has_answers(self, kind: type[FromRank], number: int = 0) -> bool:
        """Return whether `answers` would not wait: all have answered, or the group has ended."""
        with self._changed:
            return self.segment.end_reason is not None or all(
                (rank, kind, number) in self._answers for rank in range(1, self.count)
            )

    def answers(self, kind: type[Answer], number: int = 0) -> list[Answer]:
        """Wait for an answer of each other rank, in their order, and report what all ranks do.

        Args:
            kind: of the answer.
            number: of what is answered, where several may be asked at a time.

        Raises:
            ValueError: the model or the configuration is wrong for a rank.
            RunnerLostError: a rank cannot be built for another reason, or the group has ended.
        """
        with self._pulse.awaiting():
            return [self._answer(rank, kind, number) for rank in range(1, self.count)]

    def _answer(self, rank: int, kind: type[Answer], number: int) -> Answer:
        while True:
            self._raise_failure(rank)
            with self._changed:
                answer = self._answers.pop((rank, kind, number), None)
                if answer is None and (rank, Failed, 0) not in self._answers:
                    self._changed.wait(_LOOK_S)
            if isinstance(answer, kind):
                return answer
            if self.segment.end_reason is not None and self._reader.is_alive():
                self._reader.join()  # the last words of the ranks may be on their way
                continue
            self.check()
            self._report()

    def _raise_failure(self, rank: int) -> None:
        """Raise what a rank has failed with, if it has."""
        with self._changed:
            failure = self._answers.get((rank, Failed, 0))
        if isinstance(failure, Failed):
            raise (ValueError if failure.is_refusal else RunnerLostError)(failure.message)

    def _report(self) -> None:
        if self._to_show is not None:
            with self._changed:
                found = self._progress.report()
            self._to_show(found.what, found.done, found.total)

    @property
    def places(self) -> tuple[str, ...]:
        """The host of each rank, in words; empty: all are on this one."""
        return () if self._hosts is None else tuple(map(self._hosts.place, range(self.count)))

    def spans(self) -> list[Spans]:
        """Wait for what each other rank has recorded; spans of other hosts are moved to the clock of this one."""
        found, now_s = self.answers(Spans), time.monotonic()
        return [one if rank < self.num_here else _shifted(one, now_s - one.now_s) for rank, one in enumerate(found, 1)]

    def agree(self, number: int) -> None:
        """Wait until all ranks have ended a step, and compare what they have computed.

        Args:
            number: of the step, from 1 on.

        Raises:
            RunnerLostError: they differ, or the group ends before that.
        """
        self.segment.agree(number)
        if self.stages is not None and self.segment.ended[0] == 0:
            self.stages.agree(number)
        self.check()

    def end(self, rank: int, reason: str) -> None:
        """End the group because of a rank."""
        self.segment.end(rank, reason)

    def enlarge_kv(self, sizes: Sequence[int]) -> None:
        """Give the KV memory of the other ranks of this host these sizes in bytes, before the ranks map it."""
        for descriptor, num_bytes in zip(self.kv_memory, sizes, strict=True):
            os.ftruncate(descriptor, num_bytes)

    def abandon(self) -> None:
        """End the group without waiting for anything."""
        self.segment.end(0, "the group is abandoned")
        self.close()

    def close(self) -> None:
        """End all ranks after what they have been given; kill those that take too long. A second call does nothing."""
        self._pulse.stop()
        if self.segment.end_reason is None:
            with contextlib.suppress(RunnerLostError):
                self.tell_all(Close())
            ends_s = time.monotonic() + _CLOSE_S
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, ends_s - time.monotonic()))
            self.segment.end(0, "the group is closed")
        self._kill()
        self._reader.join()
        if self._hosts is not None:
            self._hosts.close()
        for link in self._links:
            link.close()
        while self.kv_memory:
            os.close(self.kv_memory.pop())

    def pids(self) -> list[int]:
        """Return the process ids of the other ranks, in their order."""
        return [process.pid for process in self._processes]

    def _start(self, rank: int, spawn: Spawn, descriptors: Sequence[int]) -> None:
        link, other = Link.pair()
        self._links.append(link)
        with other:
            process = spawn(self._names.label(rank), other.fileno(), descriptors)
        self._processes.append(process)
        _log.info("%s: process %d", self._names[rank], process.pid)

    def _read(self) -> None:
        """Note what the ranks say, until none of them can say more."""
        links = selectors.DefaultSelector()
        for rank, link in enumerate(self._links, 1):
            links.register(link, selectors.EVENT_READ, rank)
        while links.get_map():
            for key, _ in links.select():
                rank = int(key.data)
                link = self._links[rank - 1]
                try:
                    message = link.receive()
                except (EOFError, OSError, ValueError):
                    links.unregister(link)
                    continue
                self._hear(rank, message)
        links.close()

    def _hear(self, rank: int, data: bytes | bytearray) -> None:
        """Note what a rank says."""
        message = from_rank(data)
        with self._changed:
            if isinstance(message, Doing):
                self._progress.note(rank, message)
            elif isinstance(message, Said):
                logger = logging.getLogger(message.logger)
                logger.log(message.level, "%s%s: %s", self._names[rank], self._where(rank), message.text)
            elif isinstance(message, PagesMoved):
                self._moved[rank, message.number] = message
            else:
                number = message.number if isinstance(message, AdapterRead) else 0
                self._answers[rank, type(message), number] = message
            self._changed.notify_all()

    def _where(self, rank: int) -> str:
        """Return where a rank is, as an addition to its number; nothing if it is on this host."""
        return "" if self._hosts is None or rank < self.num_here else f" on {self._hosts.place(rank)}"

    def _why(self) -> str:
        """Return why the group has ended, and on which host."""
        reason, rank = self.segment.end_reason or "", int(self.segment.ended[0]) - 1
        return f"{reason} [rank {rank}{where}]" if (where := self._where(rank)) else reason

    def _dead(self) -> tuple[int, str] | None:
        """Return a rank whose process has ended, and how."""
        for rank, process in enumerate(self._processes, 1):
            if (code := process.poll()) is not None:
                return rank, f"the process of {self._names[rank]} has ended with code {code}"
        return None

    def _lose(self, rank: int, error: Exception) -> None:
        code = self._processes[rank - 1].poll() if rank <= len(self._processes) else None
        how = f"cannot be reached: {error}" if code is None else f"has ended with code {code}"
        self.segment.end(rank, f"the process of {self._names[rank]} {how}")
        raise RunnerLostError(self._why()) from error

    def _ended(self) -> None:
        """Kill what is left of the group; on the thread of the pulse."""
        _log.error("the group of %d ranks has ended: %s", self.count, self._why())
        self._kill()
        if self._at_end is not None:
            self._at_end()
        with self._changed:
            self._changed.notify_all()

    def _kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def _shifted(one: Spans, by_s: float) -> Spans:
    spans = [span._replace(start_s=span.start_s + by_s, end_s=span.end_s + by_s) for span in one.spans]
    return replace(one, spans=spans)
