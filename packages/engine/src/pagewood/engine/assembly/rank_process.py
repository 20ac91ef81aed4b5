"""The process of a rank: `python -m pagewood.engine.assembly.rank_process RANK DESCRIPTOR`, started by rank 0."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from pagewood.engine.runner.ranks.early_beats import Standstill, early_beats
from pagewood.engine.runner.ranks.link import Link
from pagewood.engine.runner.ranks.messages import (
    Begin,
    Doing,
    Failed,
    FromRank,
    Loaded,
    Ready,
    Said,
    Sizes,
    receive,
    send,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pagewood.engine.core.loop import Runner
    from pagewood.engine.runner.ranks.ranked_adapters import FollowedAdapters
    from pagewood.engine.runner.ranks.ranked_pages import FollowedPages
    from pagewood.engine.runner.ranks.ranked_weights import FollowedWeights
    from pagewood.engine.runner.ranks.segment import Segment

_PR_SET_PDEATHSIG = 1
_LOST_CODE = 3
"""Exit code of a rank whose group has ended without it."""

Talk = Callable[[FromRank], None]
"""Sends messages to rank 0, from any thread."""


class _ToRank0(logging.Handler):
    """Sends what is logged to rank 0, whose log has the lines of all ranks."""

    def __init__(self, talk: Talk) -> None:
        super().__init__()
        self._talk = talk

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # rank 0 has ended, and this process will
            self._talk(Said(logger=record.name, level=record.levelno, text=self.format(record)))


def main(descriptor: int) -> None:
    """Load what rank 0 says, compute its steps, and end with it."""
    faulthandler.enable()
    with contextlib.suppress(AttributeError, OSError):  # a stopped process continues when its parent dies, to end
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = Link(socket.socket(fileno=descriptor))
    begin = receive(link)
    assert isinstance(begin, Begin)
    sys.path[:] = begin.search_path  # not ours
    talk = partial(send, link)
    logging.basicConfig(level=begin.log_level, handlers=[_ToRank0(talk)])
    if begin.cores:
        os.sched_setaffinity(0, begin.cores)
    serve(begin, link, talk, leave=_leave)


def _leave() -> None:
    """End this process at once: threads that compute cannot be interrupted."""
    os._exit(_LOST_CODE)


def serve(begin: Begin, link: Link, talk: Talk, *, leave: Callable[[], None]) -> None:
    """Build what computes this rank's part, and follow rank 0.

    Args:
        begin: the first message of rank 0.
        link: to rank 0.
        talk: the same, for messages to it.
        leave: called when the group has ended.
    """

    def progress(what: str, done: int, total: int) -> None:
        talk(Doing(what=what, done=done, total=total))

    progress("importing torch", 0, 1)
    with early_beats(begin.segment, begin.beats_at):
        from pagewood.engine.runner.ranks.following import follow  # numba takes a second
        from pagewood.engine.runner.ranks.pulse import Pulse
        from pagewood.engine.runner.ranks.segment import Segment, mapped

        memory = mapped(begin.segment)
        segment = Segment.in_memory(memory, begin.count)
    parent = os.getppid()

    def lost() -> tuple[int, str] | None:  # a process that rank 0 has forked may keep the connection open
        return None if os.getppid() == parent else (0, "the process of rank 0 has ended")

    standstill = Standstill()
    # A rank with a device may use no processor for long: the device works, or another process compiles for it.
    standstill.is_waiting = begin.port is not None
    pulse = Pulse(segment, begin.rank, stands_still=standstill.is_found, on_end=leave, lost=lost)
    try:
        runner, weights, pages, adapters = _runner(begin, memory, segment, talk, link, standstill)
    except (EOFError, BrokenPipeError):
        pulse.stop()
        leave()
        return
    except Exception as error:
        if segment.end_reason is not None:  # rank 0 knows
            pulse.stop()
            leave()
            return
        is_refusal = isinstance(error, ValueError | OSError)
        message = str(error) if is_refusal else repr(error)
        talk(Failed(message=f"rank {begin.rank}: {message}", is_refusal=is_refusal))
        raise SystemExit(1) from error
    pulse.begin()
    progress("ready", 1, 1)
    talk(Ready())
    follow(link, runner, segment, begin.rank, leave=leave, weights=weights, pages=pages, adapters=adapters)
    pulse.stop()
    for one in (pages, weights, adapters):
        if one is not None:
            one.close()
    runner.close()


def _runner(
    begin: Begin, memory: NDArray[np.uint8], segment: Segment, talk: Talk, link: Link, standstill: Standstill
) -> tuple[Runner, FollowedWeights | None, FollowedPages | None, FollowedAdapters | None]:
    """Build what computes this rank's part, changes its weights, copies its pages if rank 0 cannot, and has its part of
    adapters.

    All ranks agree on the size of its memory.
    """

    def progress(what: str, done: int, total: int) -> None:
        talk(Doing(what=what, done=done, total=total))

    if begin.port is not None:
        from pagewood.engine.assembly.cuda.rank import follower

        return follower(begin, memory, segment, talk, progress)

    from pagewood.engine.assembly.cpu.rank import CPURank
    from pagewood.engine.assembly.cpu.weights import CPUPart
    from pagewood.engine.assembly.model_weights import ModelWeights
    from pagewood.engine.assembly.named_processors import load_processors
    from pagewood.engine.assembly.ranks.stage_place import StagePlace
    from pagewood.engine.model_folder.folder import model_folder
    from pagewood.engine.model_folder.model_digest import ModelDigest
    from pagewood.engine.models.config import ModelConfig
    from pagewood.engine.models.shard import Shard
    from pagewood.engine.models.stage import stages_of
    from pagewood.engine.runner.ranks.notes import StepNotes
    from pagewood.engine.runner.ranks.ranked_weights import FollowedWeights
    from pagewood.engine.runner.ranks.segment import segment_bytes
    from pagewood.engine.runner.ranks.stage_memory import StageMemory

    config = begin.config
    processors = load_processors(config)
    folder = model_folder(config.model)
    digest = ModelDigest(folder)
    if config.disk_cache_path is not None or config.remote_cache is not None:
        digest.begin()
    place = None
    if begin.cuts:
        shared = StageMemory.in_memory(memory[segment_bytes(begin.count) :], segment, 1 + len(begin.cuts))
        place = StagePlace.of(shared, begin.rank, stages_of(begin.cuts, ModelConfig.from_folder(folder).num_layers))
    rank = CPURank(
        config,
        folder,
        digest,
        num_threads=(config.num_threads or config.ranks_per_node) // config.ranks_per_node,
        shard=Shard(begin.rank, begin.count, by_request=config.enable_dp_attention) if place is None else place.shard,
        stage=None if place is None else place.stage,
        exchange=segment.exchange(begin.rank) if place is None else place.exchange,
        relay=None if place is None else place.relay,
        progress=progress,
    )
    num_pages, max_length = rank.num_pages(config.ranks_per_node)
    talk(
        Loaded(
            num_pages=num_pages,
            max_length=max_length,
            num_states=rank.states.num_places,
            state_interval=rank.states.interval,
            page_bytes=rank.page_bytes,
            state_bytes=rank.state_bytes,
            layers=rank.layers,
            division=rank.division,
        )
    )
    standstill.is_waiting = True
    sizes = receive(link)
    standstill.is_waiting = False
    assert isinstance(sizes, Sizes)
    rank.compile(progress)  # rank 0 has compiled what was not in the cache
    rank.allocate(sizes.num_pages, sizes.num_states, shared=begin.kv_memory)
    watch = StepNotes(segment, begin.rank) if place is None else None
    runner = rank.make_runner(max_length=sizes.max_length, processors=processors, watch=watch, place=place)
    pages = None
    if config.host_cache_gb is not None and begin.kv_memory is None:
        from pagewood.engine.assembly.tiers.lower_caches import followed_pages
        from pagewood.engine.runner.ranks.ranked_pages import HostPart

        assert rank.memory is not None
        part = HostPart(
            rank=begin.rank,
            has_whole_pages=config.enable_dp_attention,
            host_page_bytes=sizes.host_page_bytes,
            num_state_parts=sizes.num_state_parts,
        )
        mark = rank.loaded.mark + f", stages begin at {begin.cuts}" * bool(begin.cuts)
        pages = followed_pages(config, digest, rank.memory, mark=mark, part=part, states=rank.state_memory, talk=talk)
    adapters, weights = None, ModelWeights(folder, CPUPart(rank, number=begin.rank))
    if rank.adapters is not None:
        from pagewood.engine.assembly.adapter_source import adapter_folders
        from pagewood.engine.runner.ranks.ranked_adapters import FollowedAdapters

        adapters = FollowedAdapters(adapter_folders(rank.adapters, folder, weights), talk)
    return runner, FollowedWeights(weights, talk), pages, adapters


if __name__ == "__main__":
    main(int(sys.argv[2]))
    os._exit(0)  # rank 0 waits, and the end of the interpreter takes a second
