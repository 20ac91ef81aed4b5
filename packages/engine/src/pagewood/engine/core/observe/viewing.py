"""Read the core's state for a live view; changes nothing, in a time that does not grow with the queue."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import isinf
from typing import Any, Protocol, runtime_checkable

import numpy as np

from pagewood.engine.core.cache_keys import Key
from pagewood.engine.core.memory.divided_kv import AnyKV, DividedKV
from pagewood.engine.core.memory.kv import private_pages
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.queue.state import EngineState
from pagewood.engine.core.request import Request
from pagewood.engine.observe.view import BranchView, PoolView, RequestStage, RequestView, TreeView

_MAX_CELLS = 2048
_MAX_SORTED = 4096
"""Queued requests that are put into order; of a longer queue, the first by arrival."""
_MAX_BRANCHES = 256
_MAX_VISITED = 4096
_NUM_SHOWN_TOKENS = 48
_MAX_NAME = 64
_CACHED, _LOCKED, _PRIVATE = 1, 2, 3
"""Kinds of pages; free ones are 0."""


class OutlinedBranch(Protocol):
    """A run of pages of a prefix cache, and what follows it; see radixcache's `Branch`."""

    namespace: Key
    parent: int
    num_parent_pages: int
    tokens: Int32
    pages: Int32
    num_pages: int
    num_children: int
    num_leases: int
    is_locked: bool
    idle: int


@runtime_checkable
class OutlinedCache(Protocol):
    """A prefix cache whose largest branches can be listed in bounded time."""

    def outline(self, *, max_branches: int = 200, max_visited: int = 4096) -> Any:
        """Return an object with `branches` (`OutlinedBranch`), `num_runs` and `is_complete`."""
        ...


def view_requests(
    state: EngineState, kv: AnyKV, now_s: float, *, max_requests: int, sign: int, wanted: Sequence[str] = ()
) -> list[RequestView]:
    """Return up to `max_requests` requests: those with a row, then those that wait, by priority and arrival.

    Requests in `wanted` that are not among these come last.

    Args:
        state: whose requests.
        kv: where they wait for memory.
        now_s: time on the engine's clock.
        max_requests: the most to return.
        sign: -1 if clients give a lower priority to what goes first, otherwise 1.
        wanted: ids of further requests.
    """
    is_paused = state.paused != "no"
    held = state.holders[:max_requests]
    found = [_request(request, now_s, sign, _held_stage(request, is_paused=is_paused), "") for request in held]
    num_left = max_requests - len(held)
    if num_left and len(state.by_id) > len(state.running):
        others = islice((request for request in state.by_id.values() if request.row < 0), _MAX_SORTED)
        queued = sorted(others, key=lambda request: (-request.priority, request.arrival))
        for place, request in enumerate(queued[:num_left]):
            found.append(_request(request, now_s, sign, *_queued_stage(request, state, kv, is_first=place == 0)))
    if wanted:
        shown = {view.request_id for view in found}
        for name in wanted:
            request = state.by_id.get(name)
            if request is not None and name not in shown and request.row < 0:
                found.append(_request(request, now_s, sign, *_queued_stage(request, state, kv, is_first=False)))
    return found


def view_pool(state: EngineState, kv: AnyKV, held_pages: Int32) -> PoolView:
    """Return which requests have the pages. Cost: a pass over the pool in numpy, and two short arrays for each row.

    The counts are exact. In the cells, pages that are locked only because a request has duplicates of them are cached.
    Where layers have windows, all pages with an id have cells, and cached pages count by the memory that they have.
    """
    num_pages = kv.num_ids
    per_cell = -(-num_pages // _MAX_CELLS)
    num_cells = -(-num_pages // per_cell)
    kinds = np.zeros(num_cells * per_cell, np.uint8)
    kinds[held_pages] = _CACHED
    holders = state.holders
    if holders:
        kinds[np.concatenate([request.pages[: request.num_published] for request in holders])] = _LOCKED
        kinds[np.concatenate([private_pages(request) for request in holders])] = _PRIVATE
    grid = kinds.reshape(num_cells, per_cell)
    counts = np.stack([np.count_nonzero(grid == kind, axis=1) for kind in (_CACHED, _LOCKED, _PRIVATE)], axis=1)
    shares = -(-counts * 255 // per_cell)  # rounded up, so that one page is seen
    num_private = int(counts[:, -1].sum())
    num_locked = kv.num_locked
    return PoolView(
        num_pages=kv.num_pages,
        page_size=kv.page_size,
        num_free=kv.num_free,
        num_cached=max(0, kv.num_cached - num_locked),
        num_locked=num_locked,
        num_private=num_private,
        pages_per_cell=per_cell,
        cells=shares.astype(np.uint8).tobytes(),
    )


def view_tree(kv: AnyKV, hits: Int32 | None, *, shows_tokens: bool) -> TreeView | None:
    """Return the largest branches of the prefix cache; None: it cannot be listed.

    Args:
        kv: has the cache.
        hits: `[num_pages] int32`, how often each page was found in the cache; None: this is not known.
        shows_tokens: whether branches have their first token ids.
    """
    if isinstance(kv, DividedKV) or not isinstance(kv.cache, OutlinedCache):
        return None
    found = kv.cache.outline(max_branches=_MAX_BRANCHES, max_visited=_MAX_VISITED)
    size = kv.page_size
    return TreeView(
        branches=tuple(
            [
                BranchView(
                    parent=branch.parent,
                    namespace=_name(branch.namespace),
                    page=int(branch.pages[0]),
                    start=branch.num_parent_pages * size,
                    num_tokens=len(branch.pages) * size,
                    num_total=branch.num_pages * size,
                    num_children=branch.num_children,
                    num_leases=branch.num_leases,
                    is_locked=branch.is_locked,
                    idle=branch.idle,
                    num_hits=0 if hits is None else int(hits[branch.pages[0]]),
                    tokens=branch.tokens[:_NUM_SHOWN_TOKENS].astype("<i4").tobytes() if shows_tokens else b"",
                )
                for branch in found.branches
            ]
        ),
        num_runs=found.num_runs,
        is_complete=found.is_complete,
    )


def _request(request: Request, now_s: float, sign: int, stage: RequestStage, why: str) -> RequestView:
    return RequestView(
        request_id=request.request_id,
        stage=stage,
        why=why,
        priority=sign * request.own_priority,
        tenant=request.tenant[:_MAX_NAME],
        service_class=request.service_class,
        tag=request.tag[:_MAX_NAME],
        age_s=now_s - request.arrived_s,
        left_s=None if isinf(request.deadline_s) else request.deadline_s - now_s,
        num_prompt=request.num_prompt,
        num_output=request.num_generated,
        max_output=request.max_new_tokens,
        num_cached=None if request.num_cached < 0 else request.num_cached,
        num_computed=request.num_computed if request.row >= 0 else 0,
        num_pages=request.num_pages,
    )


def _held_stage(request: Request, *, is_paused: bool) -> RequestStage:
    if request.has_ended:
        return "draining"
    return "paused" if is_paused or request.pause != "no" else "running"


def _queued_stage(request: Request, state: EngineState, kv: AnyKV, *, is_first: bool) -> tuple[RequestStage, str]:
    """Return where a request without a row stands, and why."""
    if request.encoding is not None:
        return "compiling", "Its images are being encoded."
    if request.compiling is not None:
        return "compiling", "Its grammar is being compiled."
    if request.probe is not None:
        return "recalling", "The shared cache is asked how much of it is there."
    if request.pause != "no":
        return "paused", "It is paused."
    if state.paused != "no":
        return "waiting", "The engine is paused."
    if state.waiting.is_at_quota(request):
        return "parked", "Its tenant runs as much as it may, and other requests of it must end first."
    if state.waiting.is_parked(request):
        return "parked", "It repeats a prompt that is being computed, and waits until that is cached."
    if state.waiting.is_recalling(request):
        return "recalling", "Its prefix is being copied back from main memory or disk."
    before = "It was preempted because memory ran out. " if request.num_cached >= 0 else ""
    if not kv.num_free_rows:
        return "waiting", f"{before}All {len(state.running) + len(state.draining)} rows are taken."
    num_missing = kv.num_missing(request, request.num_matched)
    if num_missing > kv.num_available:
        return "waiting", f"{before}It needs {num_missing} pages, and {kv.num_available} are available."
    if is_first:
        return "waiting", f"{before}It is admitted when a step has room for its prompt and memory for all outputs."
    return "waiting", f"{before}Other requests are admitted before it."


def _name(key: Key) -> str:
    parts = key if isinstance(key, tuple) else (key,)
    return " ".join(str(part) for part in parts if part is not None)[:_MAX_NAME]
