"""What a rank other than 0 does: it launches the steps that rank 0 sends, and waits for them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from pagewood.engine.core.loop import ConstrainedHandle, Runner, StepHandle
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.codec import Masks, decode
from pagewood.engine.observe.profiling import profiled
from pagewood.engine.runner.ranks.link import Link
from pagewood.engine.runner.ranks.messages import (
    Close,
    Constrain,
    DropAdapter,
    ExchangeWeights,
    KeepAdapter,
    Launch,
    MovePages,
    ReadAdapter,
    ReadNewWeights,
    Spans,
    StartSpans,
    TakeSpans,
    receive,
    send,
)
from pagewood.engine.runner.ranks.ranked_adapters import FollowedAdapters
from pagewood.engine.runner.ranks.ranked_pages import FollowedPages
from pagewood.engine.runner.ranks.ranked_weights import FollowedWeights
from pagewood.engine.runner.ranks.segment import Segment

_log = logging.getLogger(__name__)


def follow(
    link: Link,
    runner: Runner,
    segment: Segment,
    rank: int,
    *,
    leave: Callable[[], None],
    weights: FollowedWeights | None = None,
    pages: FollowedPages | None = None,
    adapters: FollowedAdapters | None = None,
) -> None:
    """Compute what rank 0 sends until it closes the group.

    One thread launches, so that the next step is there when the last one ends. This one waits, and so helps to compute.

    Args:
        link: to rank 0.
        runner: of this rank.
        segment: of the group.
        rank: this one.
        leave: called if rank 0 has ended, or cannot be followed; the group has ended then.
        weights: of this rank; None: they never change.
        pages: of this rank; None: rank 0 copies them, or there is no host cache.
        adapters: of this rank; None: there are none.
    """
    steps: SimpleQueue[StepHandle | None] = SimpleQueue()
    arguments = (link, runner, segment, rank, steps, leave, weights, pages, adapters)
    thread = threading.Thread(target=_take, args=arguments, name="steps", daemon=True)
    thread.start()
    while (step := steps.get()) is not None:
        try:
            step.wait()
        except Exception:  # rank 0 notices that it has failed
            _log.exception("rank %d: a step failed", rank)
    thread.join()


def _take(
    link: Link,
    runner: Runner,
    segment: Segment,
    rank: int,
    steps: SimpleQueue[StepHandle | None],
    leave: Callable[[], None],
    weights: FollowedWeights | None,
    pages: FollowedPages | None,
    adapters: FollowedAdapters | None,
) -> None:
    """Take messages until the group is closed."""
    try:
        _follow(link, runner, segment, rank, steps, weights, pages, adapters)
    except (EOFError, OSError):
        segment.end(0, "the process of rank 0 has ended")
    except Exception as error:
        _log.exception("rank %d cannot follow rank 0", rank)
        segment.end(rank, f"rank {rank} cannot follow rank 0: {error!r}")
    if segment.ended[0] != 0:
        leave()
    steps.put(None)


def _follow(
    link: Link,
    runner: Runner,
    segment: Segment,
    rank: int,
    steps: SimpleQueue[StepHandle | None],
    weights: FollowedWeights | None,
    pages: FollowedPages | None,
    adapters: FollowedAdapters | None,
) -> None:
    latest: StepHandle | None = None
    number, profile = 0, profiled(runner)
    while True:
        match receive(link):
            case Launch() as message:
                number += 1
                if message.number != number:
                    raise ValueError(f"step must be {number}, got {message.number}")
                batch = decode(message.batch)
                assert isinstance(batch, Batch)
                segment.launched[rank, 0] = number
                latest = runner.launch(batch)
                steps.put(latest)
            case Constrain(masks=data):
                masks = decode(data)
                assert isinstance(masks, Masks)
                assert isinstance(latest, ConstrainedHandle)
                latest.constrain(masks.masks)
            case StartSpans() if profile is not None:
                profile.start_spans()
            case TakeSpans():
                spans, num_dropped = ((), 0) if profile is None else profile.take_spans()
                send(link, Spans(spans=list(spans), num_dropped=num_dropped, now_s=time.monotonic()))
            case ReadNewWeights() as message if weights is not None:
                weights.read(message.command)
            case ReadAdapter() as message if adapters is not None:
                adapters.read(message.number, message.folder)
            case KeepAdapter() as message if adapters is not None:
                adapters.keep(message.load, message.number)
            case DropAdapter() as message if adapters is not None:
                adapters.drop(message.load)
            case MovePages() as message if pages is not None:
                pages.move(message)
            case ExchangeWeights() if weights is not None:
                weights.exchange()
            case Close():
                return
            case _:
                pass
