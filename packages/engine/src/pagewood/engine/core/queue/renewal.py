"""What becomes of requests and of their KV when the weights of an engine change. No step is in flight then."""

from __future__ import annotations

from collections.abc import Sequence

from pagewood.engine.api import Image
from pagewood.engine.core.cache_keys import CacheKeys, namespace_of
from pagewood.engine.core.images import ImageEncoder
from pagewood.engine.core.memory.divided_kv import AnyKV
from pagewood.engine.core.queue.pausing import pause, retract_all, settle
from pagewood.engine.core.queue.priority_preemption import stop_all
from pagewood.engine.core.queue.state import EngineState
from pagewood.engine.core.request import Request


def renew(state: EngineState, kv: AnyKV, keys: CacheKeys, *, recomputes: bool) -> int:
    """Let no request get KV of the old weights from the cache, and drop what no request uses.

    Those that run go on behind what they have computed, and the cache gets no more of it: their KV is of several
    weights from now on. When they run again after a preemption, they are as others.

    Args:
        state: has the requests.
        kv: has their memory.
        keys: of the new weights.
        recomputes: whether those that run give their KV back, so that it is computed again.

    Returns:
        How many have given it back.
    """
    num_stopped = 0
    if recomputes:
        num_stopped = stop_all(state, kv, list(state.running))
        retract_all(state)
        num_stopped += settle(state, kv)
    for request in list(state.by_id.values()):
        key = keys.renewed(request.key, is_long=request.is_long, adapter=request.adapter)
        if request.row >= 0:
            request.renewed_key = key
            continue
        is_waiting = request in state.waiting
        if is_waiting:  # its watch, and what is copied for it, are of the old key
            state.waiting.remove(request)
        request.key = key
        if is_waiting:
            state.waiting.add(request)
        elif request.probe is not None:
            request.probe = kv.probe(request)
    kv.flush()
    return num_stopped


def show_again(state: EngineState, kv: AnyKV, encoder: ImageEncoder) -> int:
    """Take the requests back whose images an earlier tower has made rows of, and let the present one encode them.

    They lose their KV, also of text, which has seen the rows; it goes to the cache under their old keys.

    Returns:
        How many that ran have lost it.
    """
    live = state.by_id.values()
    stale = {one: one.images for one in live if one.images is not None and one.images.version != encoder.version}
    num_stopped = stop_all(state, kv, [one for one in state.running if one in stale])
    for request in stale:
        if request in state.held:
            pause(state, request, retract=True)
    num_stopped += settle(state, kv)
    for request, images in stale.items():
        if request not in state.compiling:
            place = state.held if request in state.held else state.waiting
            place.remove(request)
            state.compiling.append(request)
        encode(request, images.sources, encoder)
    return num_stopped


def encode(request: Request, images: Sequence[Image], encoder: ImageEncoder) -> None:
    """Begin to make rows of the images of a request's prompt."""
    namespace = namespace_of(request.key)
    assert not isinstance(namespace, int)
    request.encoding = encoder.encode(
        request.tokens[: request.num_prompt], images, namespace=namespace, is_wanted=lambda: not request.has_ended
    )
