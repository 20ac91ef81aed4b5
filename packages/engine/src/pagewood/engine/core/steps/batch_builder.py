"""Turns the grants of a step into a batch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from pagewood.engine.api import SamplingParams
from pagewood.engine.core.cache_keys import Key, namespace_of
from pagewood.engine.core.memory.adapters import AdapterPool
from pagewood.engine.core.memory.divided_kv import AnyKV
from pagewood.engine.core.memory.page_groups import PageGroups
from pagewood.engine.core.messages.adjustments import Adjustments
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import NUM_STOP_IDS, Batch
from pagewood.engine.core.messages.images import BatchImages
from pagewood.engine.core.messages.logprobs import Reports
from pagewood.engine.core.messages.processors import Processors
from pagewood.engine.core.messages.sampling_table import SamplingArrays
from pagewood.engine.core.request import Request
from pagewood.engine.core.steps.grant import Grant


class BatchBuilder:
    """Turns grants into arrays. Keeps the sampling parameters of each row, so that a decode step only gathers them.

    Args:
        num_rows: requests that can hold a row at the same time.
        page_size: positions per page.
        is_drafting: whether the runner drafts tokens; it then needs all tokens of a row, also those whose KV is cached,
            as it does for a request whose logits are changed.
        groups: the frames of pages; None: a page is its memory in all layers.
        has_lengths: whether the model has two sets of factors for rotations.
        adapters: have a slot for each request; None: there are none.
        kv: has the places of states, where layers are recurrent; None: none is.
    """

    __slots__ = (
        "_adapters", "_decoded", "_decoded_asking", "_decoded_rows", "_decoded_sampling", "_groups", "_has_lengths",
        "_is_drafting", "_key", "_kv", "_num_rows", "_page_size", "_table",
    )  # fmt: skip

    def __init__(
        self,
        *,
        num_rows: int,
        page_size: int,
        is_drafting: bool = False,
        groups: PageGroups | None = None,
        has_lengths: bool = False,
        adapters: AdapterPool | None = None,
        kv: AnyKV | None = None,
    ) -> None:
        self._kv = kv
        self._adapters = adapters
        self._has_lengths = has_lengths
        self._num_rows = num_rows
        self._groups = groups
        self._page_size = page_size
        self._is_drafting = is_drafting
        self._key = os.urandom(16)
        """Makes the numbers of namespaces impossible to guess, so that no tenant can choose a name like another's."""
        self._table = SamplingArrays.of([SamplingParams()] * num_rows, [0] * num_rows)
        # The last step, if _build_decode built it: most steps decode the same requests as the step before.
        self._decoded: list[Request] = []  # written by: build, _build_decode
        self._decoded_asking: list[int] = []
        """Which of them ask for inner rows."""  # written by: _build_decode
        self._decoded_rows: Int32 = np.empty(0, np.int32)  # written by: _build_decode
        self._decoded_sampling = self._table.take(self._decoded_rows)  # written by: _build_decode

    def build(
        self,
        grants: Sequence[Grant],
        *,
        is_constraining: bool = False,
        is_decode: bool = False,
        is_followed: bool = True,
    ) -> Batch:
        """Return the arrays of one step.

        Args:
            grants: those of one plan, before its launch is counted.
            is_constraining: whether any of their requests may have a grammar.
            is_decode: whether every grant is for a request that decodes, with drafts or without.
            is_followed: see `Batch.is_followed`.
        """
        extras = self._states(grants)
        if is_decode and not is_constraining:
            return self._build_decode(grants, extras, is_followed=is_followed)
        self._decoded = []  # their rows and parameters may change
        page_size = self._page_size
        page_rows: list[int] = []
        page_columns: list[int] = []
        page_ids: list[Int32] = []
        admitted: list[Request] = []
        admitted_at: list[int] = []
        token_starts: list[int] = []
        scored: list[tuple[int, int, int]] = []
        pooled: list[tuple[int, int, int]] = []
        asking: list[int] = []
        for index, grant in enumerate(grants):
            request, start, is_admitted = grant.request, grant.start, grant.is_admitted
            if request.experts is not None or request.states is not None:
                asking.append(index)
            if grant.num_tokens == 1 and start % page_size and start >= request.num_prompt and not is_admitted:
                continue  # a decode in a page that is known already
            first = 0 if is_admitted else -(-start // page_size)  # a page that contains `start` is known already
            last = -(-(start + grant.num_tokens) // page_size)
            if first < last:
                page_rows.append(request.row)
                page_columns.append(first)
                page_ids.append(request.pages[first:last])
            if start < request.num_prompt:
                num_scored = request.num_scored_in(start, grant.num_tokens)
                if num_scored:
                    scored.append((index, num_scored, request.sampling.prompt_logprobs or 0))
                if request.pool is not None:
                    skipped, num_pooled = request.pool.wanted_in(start, grant.num_tokens)
                    if num_pooled:
                        pooled.append((index, skipped, num_pooled))
            if is_admitted:
                admitted.append(request)
                admitted_at.append(index)
                reads_text = self._is_drafting or request.sampling.changes_logits
                token_starts.append(0 if reads_text else start)
        token_rows = [request.row for request in admitted]
        self._table.put(token_rows, [one.sampling for one in admitted], [one.seed for one in admitted])
        token_ids = [one.tokens[start : one.num_known] for one, start in zip(admitted, token_starts, strict=True)]
        if is_constraining:
            extras["constrained"] = np.array(_constrained(grants), np.int32)
            for request in _untold(grants):
                first = request.num_known - request.num_untold
                token_rows.append(request.row)
                token_starts.append(first)
                token_ids.append(request.tokens[first : request.num_known])
        tokens = _Ragged(token_rows, token_starts, token_ids)
        pages = _Ragged(page_rows, page_columns, page_ids)
        places = self._frames_of(pages.rows, pages.columns, pages.values)
        rows = np.array([grant.request.row for grant in grants], np.int32)
        promised = np.array([grant.num_promised for grant in grants], np.int32)
        sampled = promised.nonzero()[0]
        if admitted:
            extras["admitted"] = np.array(admitted_at, np.int32)
            extras["limits"] = np.array([one.max_length for one in admitted], np.int32)
            extras["adjustments"] = Adjustments.of(admitted)
            extras["processors"] = Processors.of(admitted)
            extras["reports"] = Reports.of(admitted)
            extras["images"] = BatchImages.of(admitted_at, admitted)
            extras["stop_ids"] = np.array([_padded(one.stop_ids) for one in admitted], np.int32)
            if self._adapters is not None:
                extras["adapters"] = np.array([self._adapters.place_of(one) for one in admitted], np.int32)
            if self._has_lengths:
                extras["is_long"] = np.array([one.is_long for one in admitted], np.int32)
            if self._is_drafting:
                extras["namespaces"] = np.array([self._number_of(one.key) for one in admitted], np.int64)
        if scored:
            extras["scored"] = np.array(scored, np.int32)
        if pooled:
            extras["pooled"] = np.array(pooled, np.int32)
        if asking:
            extras |= _rows_asked(grants, asking)
        return Batch(
            **extras,
            is_followed=is_followed,
            page_rows=places[0],
            page_columns=places[1],
            page_ids=places[2],
            token_rows=tokens.rows,
            token_positions=tokens.columns,
            token_ids=tokens.values,
            rows=rows,
            starts=np.array([grant.start for grant in grants], np.int32),
            counts=np.array([grant.num_tokens for grant in grants], np.int32),
            sampled=sampled.astype(np.int32),
            num_promised=promised[sampled],
            sampling=self._table.take(rows[sampled].astype(np.intp)),
        )

    def _states(self, grants: Sequence[Grant]) -> dict[str, Any]:
        """Return the fields of a batch that name states."""
        if self._kv is None:
            return {}
        states: list[tuple[int, int]] = []
        copies: list[tuple[int, int, int]] = []
        for index, grant in enumerate(grants):
            places, of_grant = self._kv.states_of(grant)
            states.append(places)
            copies += [(index, *copy) for copy in of_grant]
        entries = np.array(copies, np.int32).reshape(-1, 3)
        return {"states": np.array(states, np.int32), "state_copies": entries}

    def _build_decode(self, grants: Sequence[Grant], extras: dict[str, Any], *, is_followed: bool) -> Batch:
        """Return the same as `build` for requests that all decode, in less time."""
        requests = [grant.request for grant in grants]
        if requests != self._decoded:
            rows = np.array([request.row for request in requests], np.int32)
            self._decoded, self._decoded_rows = requests, rows
            self._decoded_asking = [i for i, one in enumerate(requests) if (one.experts or one.states) is not None]
            self._decoded_sampling = self._table.take(rows)
        if self._decoded_asking:
            extras |= _rows_asked(grants, self._decoded_asking)
        num = len(grants)
        places = [grant.start for grant in grants]
        starts = np.array(places, np.int32)
        rows = self._decoded_rows.copy()
        counts, promised = np.ones((2, num), np.int32)
        nums = [grant.num_tokens for grant in grants]
        if max(nums) > 1:
            counts[:] = nums
            promised[:] = [grant.num_promised for grant in grants]
            page_rows, columns, ids = self._pages_of_drafts(requests, rows, places, nums)
        else:
            page_rows, columns, ids = self._pages_of_tokens(requests, rows, places, starts)
        page_rows, columns, ids = self._frames_of(page_rows, columns, ids)
        return Batch(
            **extras,
            page_rows=page_rows,
            page_columns=columns,
            page_ids=ids,
            token_rows=np.empty(0, np.int32),
            token_positions=np.empty(0, np.int32),
            token_ids=np.empty(0, np.int32),
            rows=rows,
            starts=starts,
            counts=counts,
            sampled=np.arange(num, dtype=np.int32),
            num_promised=promised,
            sampling=self._decoded_sampling.copy(),
            is_followed=is_followed,
        )

    def _pages_of_tokens(
        self, requests: Sequence[Request], rows: Int32, places: Sequence[int], starts: Int32
    ) -> tuple[Int32, Int32, Int32]:
        """Return rows, columns and ids of the pages that begin with one of the tokens at `places`, one per request."""
        page_size = self._page_size
        if page_size == 1:
            ids = [request.pages.item(place) for request, place in zip(requests, places, strict=True)]
            return rows.copy(), starts.copy(), np.array(ids, np.int32)
        fresh = np.flatnonzero(starts % page_size == 0)
        columns = starts[fresh] // page_size
        ids = [
            requests[index].pages.item(column) for index, column in zip(fresh.tolist(), columns.tolist(), strict=True)
        ]
        return rows[fresh], columns, np.array(ids, np.int32)

    def _pages_of_drafts(
        self, requests: Sequence[Request], rows: Int32, places: Sequence[int], nums: Sequence[int]
    ) -> tuple[Int32, Int32, Int32]:
        """Return rows, columns and ids of the pages that begin in the `nums` positions from `places` on."""
        page_size = self._page_size
        page_rows: list[int] = []
        firsts: list[int] = []
        pieces: list[Int32] = []
        for request, row, place, num in zip(requests, rows.tolist(), places, nums, strict=True):
            first, last = -(-place // page_size), -(-(place + num) // page_size)
            if first < last:
                page_rows.append(row)
                firsts.append(first)
                pieces.append(request.pages[first:last])
        pages = _Ragged(page_rows, firsts, pieces)
        return pages.rows, pages.columns, pages.values

    def _frames_of(self, rows: Int32, columns: Int32, pages: Int32) -> tuple[Int32, Int32, Int32]:
        """Return rows, columns and ids in the runner's tables, where pages are frames if there are several groups."""
        if self._groups is None or not len(pages):
            return rows, columns, pages
        return self._groups.spread(rows, columns, pages, self._num_rows)

    def _number_of(self, key: Key) -> int:
        namespace = namespace_of(key)
        if namespace is None:
            return 0
        digest = blake2b(str(namespace).encode(), digest_size=8, key=self._key).digest()
        return int.from_bytes(digest, "little", signed=True)


def _rows_asked(grants: Sequence[Grant], asking: Sequence[int]) -> dict[str, Any]:
    """Return the fields of a batch that name inner rows, given the grants whose requests ask for some."""
    asked: dict[str, list[tuple[int, int]]] = {"routed": [], "stated": []}
    for index in asking:
        grant = grants[index]
        for name, own in (("routed", grant.request.experts), ("stated", grant.request.states)):
            if own is not None and own.skipped(grant.start) < grant.num_tokens:
                asked[name].append((index, own.skipped(grant.start)))
    return {name: np.array(entries, np.int32) for name, entries in asked.items() if entries}


def _constrained(grants: Sequence[Grant]) -> list[int]:
    """Return which of the grants that yield tokens have a grammar."""
    promising = [grant.request for grant in grants if grant.num_promised]
    return [index for index, request in enumerate(promising) if request.matcher is not None]


def _untold(grants: Sequence[Grant]) -> list[Request]:
    """Return the requests admitted before this step that have tokens which the runner does not know yet."""
    return [grant.request for grant in grants if grant.request.num_untold and not grant.is_admitted]


def _padded(stop_ids: frozenset[int]) -> list[int]:
    some = list(stop_ids)[:NUM_STOP_IDS]
    return some + [-1] * (NUM_STOP_IDS - len(some))


class _Ragged:
    """Pieces of table rows as flat arrays: each value with its row and its column."""

    __slots__ = ("columns", "rows", "values")

    def __init__(self, rows: list[int], starts: list[int], pieces: list[Int32]) -> None:
        if not pieces:
            self.rows = self.columns = self.values = np.empty(0, np.int32)
            return
        if len(pieces) == 1:
            num = len(pieces[0])
            self.rows = np.full(num, rows[0], np.int32)
            self.columns = np.arange(starts[0], starts[0] + num, dtype=np.int32)
            self.values = pieces[0].copy()
            return
        lengths = [len(piece) for piece in pieces]
        self.values = np.concatenate(pieces)
        self.rows = np.repeat(np.array(rows, np.int32), lengths)
        ends = np.cumsum(lengths)
        shift = np.array(starts, np.int64) + lengths - ends  # column = index + shift of its piece
        self.columns = (np.arange(len(self.values)) + np.repeat(shift, lengths)).astype(np.int32)
