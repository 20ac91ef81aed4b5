"""Requests that are paused alone: they leave the queue or the running requests, and come back when they are resumed.

A request in place keeps its row and pages while other requests do not lack them. A request whose step is in flight
cannot lose its pages, so one that is retracted keeps them until that step has been retired.
"""

from __future__ import annotations

from pagewood.engine.core.memory.divided_kv import AnyKV
from pagewood.engine.core.queue.state import EngineState
from pagewood.engine.core.request import Request


def pause(state: EngineState, request: Request, *, retract: bool) -> None:
    """Pause a request whose last answer has not been made; one that is paused already may still be retracted."""
    is_new = request.pause == "no"
    if is_new or retract:
        request.pause = "retract" if retract else "in_place"
    request.was_paused = True
    if not is_new or request in state.compiling:  # one that is being compiled is held when that is over
        return
    if request.row < 0:
        state.waiting.remove(request)
    else:
        state.suspend(request)
    state.held.append(request)


def resume(state: EngineState, request: Request) -> None:
    """Go on with a request that is paused alone; do nothing for one that is not."""
    if request.pause == "no":
        return
    request.pause = "no"
    if request in state.compiling:
        return
    state.held.remove(request)
    if request.row < 0:
        state.waiting.add(request)
    else:
        state.go_on(request)


def pause_compiled(state: EngineState, request: Request) -> None:
    """Hold a request that was paused alone while its grammar was compiled; it was never queued."""
    state.held.append(request)


def forget(state: EngineState, request: Request) -> None:
    """Take out a held request that has ended."""
    state.held.remove(request)
    if request.row >= 0:
        state.waiting.stopped(request)


def retract_all(state: EngineState) -> None:
    """Let all held requests give their memory back."""
    for request in state.held:
        request.pause = "retract"


def settle(state: EngineState, kv: AnyKV) -> int:
    """Take the memory of the held requests that give it back and have no step in flight; return how many."""
    leaving = [request for request in state.held if request.pause == "retract" and request.row >= 0]
    ready = [request for request in leaving if not request.num_in_flight]
    for request in ready:
        kv.release(request)
        state.waiting.stopped(request)
        state.waiting.count_preempted(request.own_priority)
    return len(ready)


def give_back(state: EngineState, kv: AnyKV, *, to: Request | None = None) -> bool:
    """Take the memory of the request that was paused in place last, for others that lack it.

    Args:
        state: has the requests that are paused alone.
        kv: releases the memory.
        to: the request that lacks pages; None: any, or it is a row that is lacking.

    Returns:
        Whether there was one whose steps have all been retired.
    """
    for request in reversed(state.held if to is None else kv.beside(to, state.held)):
        if request.row >= 0 and not request.num_in_flight:
            request.pause = "retract"
            kv.release(request)
            state.waiting.stopped(request)
            return True
    return False
