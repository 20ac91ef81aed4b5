"""Requests whose layers have windows: what they read is there, and what they do not need any more is given back."""

import random
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewood.engine.core.memory import kv as kv_module
from pagewood.engine.core.memory import page_groups
from pagewood.engine.core.memory.kv import KVSpace
from pagewood.engine.core.memory.page_groups import PageGroups, longest_request, num_frames_needed
from pagewood.engine.core.memory.retention import Retention
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.request import Request
from pagewood.kvpool import PageAllocator
from pagewood.radixcache import RadixCache
from pagewood.radixcache.namespaces import ANY, AnyNamespace, Namespace
from parts import make_request
from scale import scaled
from seeded_faults import Edit, assert_found, by_turns

NUM_ROWS = 3


def make_groups(
    windows: tuple[int | None, ...], *, num_frames: int, page_size: int = 4, num_ahead: int = 8
) -> PageGroups:
    num_whole = windows.count(None)
    return PageGroups(
        windows,
        frames=PageAllocator(num_frames),
        ids=PageAllocator(num_frames // num_whole if num_whole else 4 * num_frames),
        page_size=page_size,
        num_ahead=num_ahead,
    )


def make_windowed_space(
    windows: tuple[int | None, ...], *, num_frames: int, page_size: int = 4, num_ahead: int = 8, retained: int = 0
) -> tuple[KVSpace, PageGroups]:
    groups = make_groups(windows, num_frames=num_frames, page_size=page_size, num_ahead=num_ahead)
    retention = Retention(
        num_pages=groups.num_ids, max_pages=retained, max_s=9.0, page_size=page_size, clock=lambda: 0.0, groups=groups
    )
    space = KVSpace(
        make_cache=partial(RadixCache, page_size, history_tokens=1000),
        allocator=groups,
        page_size=page_size,
        num_rows=NUM_ROWS,
        retention=retention if retained else None,
    )
    return space, groups


class Reader:
    """Computes requests over a `KVSpace` as a runner would: it knows frames only, and what was written to them.

    Invariant: what a request reads of a page is what was computed for its own tokens up to the end of the page.
    """

    def __init__(self, kv: KVSpace, windows: tuple[int | None, ...]) -> None:
        self.kv = kv
        self.windows = windows
        self.written: dict[int, tuple[int, ...]] = {}
        """By frame: group and tokens up to the end of its page, as far as they are computed."""
        self.tables = np.full((len(windows) * NUM_ROWS, 200), -1, np.int32)
        self.running: list[Request] = []

    def announce(self, request: Request, first: int) -> None:
        """Take over the pages from `first` on, as from a batch."""
        assert self.kv.groups is not None
        pages = request.pages[first : request.num_pages]
        columns = np.arange(first, request.num_pages, dtype=np.int32)
        rows, columns, frames = self.kv.groups.spread(
            np.full(len(pages), request.row, np.int32), columns, pages, NUM_ROWS
        )
        self.tables[rows, columns] = frames

    def admit(self, request: Request, count: int) -> bool:
        expected = self.usable(request)
        if not self.kv.admit(request, max_tokens=count, num_reserved=0):
            return False
        assert request.num_matched == expected
        self.tables[request.row :: NUM_ROWS] = -1
        self.announce(request, 0)
        self.running.append(request)
        return True

    def usable(self, request: Request) -> int:
        """Return the longest cached prefix that can be used, by trying all."""
        assert self.kv.groups is not None
        size, tokens = self.kv.page_size, request.reusable_tokens()
        pages = self.kv.cache.peek(tokens, None).pages
        zeros = np.zeros(len(pages), np.int32)
        for num in range(len(pages), -1, -1):
            rows, columns, _ = self.kv.groups.spread(zeros, np.arange(len(pages), dtype=np.int32), pages, NUM_ROWS)
            there = set(zip((rows // NUM_ROWS).tolist(), columns.tolist(), strict=True))
            needed = {
                (group, page)
                for group, window in enumerate(self.windows)
                for page in range(0 if window is None else max(0, (num * size + 1 - window) // size), num)
            }
            if needed <= there:
                return num * size
        raise AssertionError("no prefix is always usable")

    def compute(self, request: Request, count: int) -> bool:
        """Compute `count` more positions of a request: read what their layers see, and write theirs."""
        first_page, size = request.num_pages, self.kv.page_size
        start, end = request.num_computed, request.num_computed + count
        if not self.kv.grow(request, end):
            return False
        self.announce(request, first_page)
        tokens = tuple(request.tokens[:end].tolist())
        for group, window in enumerate(self.windows):
            table = self.tables[group * NUM_ROWS + request.row]
            first = 0 if window is None else max(0, start + 1 - window)
            for position in range(first // size * size, start, size):
                stop = min(position + size, start)
                found = self.written[int(table[position // size])]
                assert found[: stop + 1] == (group, *tokens[:stop]), f"group {group} does not have position {position}"
            for page in range(start // size, -(-end // size)):
                self.written[int(table[page])] = (group, *tokens[: min((page + 1) * size, end)])
        request.num_computed = end
        request.num_known = max(request.num_known, min(end + 1, request.max_length))
        self.kv.publish(request) if start < request.num_prompt else None
        self.kv.pass_windows([request])
        window = self.windows[-1] or end
        assert request.num_passed == max(0, (end + 1 - window) // size)
        return True

    def stop(self, request: Request) -> None:
        self.running.remove(request)
        self.kv.release(request)

    def check(self) -> None:
        assert self.kv.violation(self.running) is None, self.kv.violation(self.running)
        if not self.running and not self.kv.num_retained:
            assert self.kv.num_available == self.kv.num_pages


def drawn_run(rng: random.Random) -> None:
    """Run random requests over a small space; many begin alike."""
    windows = rng.choice(((None, 6), (None, None, 9), (5,), (None, 7, 7, 7), (1,), (None, 1)))
    size = rng.choice((1, 4))
    longest = 40
    num_frames = num_frames_needed(windows, longest, page_size=size, num_ahead=8) + rng.randint(0, 60)
    retained = rng.choice((0, 0, num_frames // len(windows) // 4))
    kv, groups = make_windowed_space(windows, num_frames=num_frames, page_size=size, retained=retained)
    reader = Reader(kv, windows)
    stems = [[rng.randrange(3) for _ in range(30)] for _ in range(2)]
    for arrival in range(60):
        choice = rng.random()
        if choice < 0.35:
            prompt = rng.choice(stems)[: rng.randint(1, 30)] + [rng.randrange(3) for _ in range(rng.randint(0, 2))]
            request = make_request(prompt, max_new=longest - len(prompt), arrival=arrival)
            assert reader.admit(request, rng.randint(1, 8)) or reader.running, "a request was declined that is alone"
        elif choice < 0.85 and reader.running:
            request = rng.choice(reader.running)
            most = min(request.num_known - request.num_computed, 8)
            has_ended = request.num_known == request.max_length
            if has_ended or not reader.compute(request, rng.randint(1, most)):
                reader.stop(request)
        elif choice < 0.93 and reader.running:
            reader.stop(rng.choice(reader.running))
        elif choice < 0.97:
            stem = np.array(rng.choice(stems), np.int32)
            kv.retain(stem, None, 5.0) if rng.random() < 0.5 else kv.drop(stem, None)
        elif rng.random() < 0.2:
            kv.flush()
        reader.check()
    for request in list(reader.running):
        reader.stop(request)
    kv.flush()
    reader.check()
    assert groups.num_free == kv.num_pages


@settings(max_examples=scaled(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rng=st.randoms(use_true_random=False))
def test_requests_find_what_they_read_in_every_group(rng: random.Random) -> None:
    drawn_run(rng)


FAULTS: dict[str, list[Edit]] = {
    "given back too early": [(kv_module.KVSpace, "pass_windows", "+ 1 - groups.window", "+ 5 - groups.window")],
    "never given back": [(kv_module.KVSpace, "pass_windows", "first > request.num_passed", "False")],
    "windows not checked": [(page_groups.PageGroups, "num_usable", "if not missing.any():", "if True:")],
    "one page too few": [(page_groups.PageGroups, "num_usable", "places + 1 - self.reach", "places + 2 - self.reach")],
    "one page too many": [(page_groups.PageGroups, "num_usable", "places + 1 - self.reach", "places - self.reach")],
    "frames in use taken": [(page_groups.PageGroups, "_is_idle", "(self._users[pages] == 0)", "True")],
    "cached frames lost": [(page_groups.PageGroups, "let_go", "self._take(unused[~is_cached])", "pass")],
    "hit does not use": [(page_groups.PageGroups, "use", "self._users[pages] += 1", "pass")],
    "idle not counted": [(page_groups.PageGroups, "num_available", "self.num_idle * self._num_windowed", "0")],
}


@pytest.mark.parametrize("fault", by_turns(FAULTS))
def test_seeded_faults_are_found(fault: str) -> None:
    assert_found(FAULTS[fault], lambda seed: drawn_run(random.Random(seed)), range(300))


def prefill(reader: Reader, request: Request, *, chunk: int = 8) -> Request:
    """Admit a request and compute all its known tokens."""
    assert reader.admit(request, chunk)
    while request.num_computed < request.num_prompt:
        assert reader.compute(request, min(chunk, request.num_prompt - request.num_computed))
    return request


def finish(reader: Reader, prompt: list[int], *, max_new: int = 8) -> Request:
    request = prefill(reader, make_request(prompt, max_new=max_new))
    reader.stop(request)
    return request


def test_a_long_request_holds_its_window_only() -> None:
    kv, groups = make_windowed_space((8,), num_frames=6)
    reader = Reader(kv, (8,))
    request = prefill(reader, make_request(list(range(80)), max_new=8), chunk=4)
    assert len(groups.held_frames()) <= 6
    reader.stop(request)
    assert kv.num_available == 6


def test_windows_behind_a_running_request_stay_cached_until_memory_is_short() -> None:
    kv, _ = make_windowed_space((None, 4), num_frames=36)
    reader = Reader(kv, (None, 4))
    finish(reader, list(range(32)))
    beginning = make_request([*range(12), 90, 91])
    assert kv.peek(beginning) == 12
    finish(reader, list(range(100, 148)))  # takes 24 of the 36 frames
    assert kv.peek(beginning) == 0
    assert kv.peek(make_request(list(range(34)))) == 32  # the window at the end of a prompt is worth more


def test_a_prefix_whose_windows_were_taken_can_be_used_after_it_is_computed_again() -> None:
    kv, groups = make_windowed_space((None, 4), num_frames=60)
    reader = Reader(kv, (None, 4))
    prompt = list(range(24))
    finish(reader, prompt)
    groups.drop_windows(groups.to_trim(kv.num_pages, ends=True))
    assert kv.peek(make_request(prompt)) == 0
    finish(reader, prompt)
    assert kv.peek(make_request([*prompt, 1])) == 24


def test_a_miss_for_want_of_windows_is_explained() -> None:
    kv, groups = make_windowed_space((None, 4), num_frames=60)
    reader = Reader(kv, (None, 4))
    finish(reader, list(range(24)))
    groups.drop_windows(groups.to_trim(kv.num_pages, ends=True))
    request = make_request(list(range(24)))
    request.explains = True
    assert reader.admit(request, 8)
    found = request.cached_prefix
    assert found is not None
    assert (found.cause, found.num_tokens, found.num_possible_tokens) == ("window_evicted", 0, 20)
    assert found.evicted_by is None


def test_a_retained_prefix_keeps_the_windows_at_its_end() -> None:
    kv, groups = make_windowed_space((None, 4), num_frames=60, retained=10)
    reader = Reader(kv, (None, 4))
    prompt = np.arange(24, dtype=np.int32)
    finish(reader, prompt.tolist())
    assert kv.retain(prompt, None, 5.0) == 24
    groups.drop_windows(groups.to_trim(kv.num_pages, ends=True))
    assert kv.peek(make_request([*prompt.tolist(), 1])) == 24
    kv.drop(prompt, None)
    assert kv.violation(()) is None


def test_without_windows_to_give_back_healing_frees_every_frame() -> None:
    kv, groups = make_windowed_space((None, 4, 4), num_frames=60)
    reader = Reader(kv, (None, 4, 4))
    prefill(reader, make_request(list(range(20))))
    kv.heal()
    assert (kv.num_free, len(groups.held_frames()), kv.violation(())) == (20, 0, None)


def test_a_copy_gets_no_more_pages_than_there_are_ids() -> None:
    """Where no group is whole, most pages of a prefix need no memory, so memory alone would allow more."""
    groups = PageGroups((8,), frames=PageAllocator(12), ids=PageAllocator(6), page_size=4, num_ahead=8)
    kv = KVSpace(make_cache=partial(RadixCache, 4), allocator=groups, page_size=4, num_rows=NUM_ROWS)
    reader = Reader(kv, (8,))
    finish(reader, list(range(16)), max_new=1)
    assert kv.take(7, num_available=1) is None
    pages = kv.take(6, num_available=1)
    assert pages is not None
    assert len(groups.held_frames()) == 2
    assert kv.cache.num_pages == 0


class CopyingCache(RadixCache):
    """Begins copies of all idle pages when it evicts, as one with lower tiers may, and ends them when it has to."""

    def __init__(self, groups: PageGroups) -> None:
        super().__init__(4)
        self.groups = groups
        self.copied = np.empty(0, np.int32)

    def keep(self, pages: Int32) -> None:
        pass

    def evict(self, num_pages: int, namespace: Namespace | AnyNamespace = ANY) -> Int32:
        evicted = super().evict(num_pages, namespace)
        if not len(self.copied):
            self.copied = self.groups.to_trim(self.groups.num_pages, ends=True)
            self.groups.hold(self.copied)
        return evicted

    def finish_copies(self) -> None:
        self.groups.end_copy(self.copied)
        self.copied = np.empty(0, np.int32)


def test_copies_that_begin_while_room_is_made_end_before_their_pages_are_taken() -> None:
    windows = (None, 4, 4, 4)
    groups = make_groups(windows, num_frames=82)  # fewer frames are over than a copy holds
    kv = KVSpace(make_cache=partial(CopyingCache, groups), allocator=groups, page_size=4, num_rows=NUM_ROWS)
    reader = Reader(kv, windows)
    finish(reader, list(range(16)))
    request = prefill(reader, make_request(list(range(40))))
    num_pages = request.num_pages + kv.num_available
    request.pages = np.resize(request.pages, num_pages)
    assert kv.grow(request, 4 * num_pages)
    assert (request.num_pages, kv.num_available) == (num_pages, 0)


def test_pages_that_are_cached_count_by_the_memory_that_they_have() -> None:
    kv, groups = make_windowed_space((None, 4, 4, 4), num_frames=80)
    reader = Reader(kv, (None, 4, 4, 4))
    finish(reader, list(range(32)))
    assert (kv.num_free, kv.num_cached) == (12, 8)
    groups.drop_windows(
        groups.to_trim(kv.num_pages, ends=True)
    )  # two of the four frames of each page would do: all are idle
    assert (kv.num_free, kv.num_cached, kv.cache.num_pages) == (18, 2, 8)


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        ((None,), "must have a group with a window"),
        ((), "must have groups"),
        ((4, None), "those that need all positions first"),
        ((None, 4, 5), "must be equal"),
        ((0,), "must be equal and >= 1"),
    ],
)
def test_groups_that_do_not_fit_together_are_refused(windows: tuple[int | None, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_groups(windows, num_frames=8)


@given(
    windows=st.sampled_from([(None,), (None, 20), (7,), (None, None, 33)]),
    num_frames=st.integers(1, 100),
    page_size=st.sampled_from([1, 4, 16]),
)
def test_the_longest_request_fits_and_one_token_more_does_not(
    windows: tuple[int | None, ...], num_frames: int, page_size: int
) -> None:
    found = longest_request(windows, num_frames, page_size=page_size, num_ahead=8, limit=5000)
    needed = [num_frames_needed(windows, length, page_size=page_size, num_ahead=8) for length in (found, found + 1)]
    assert needed[0] <= num_frames
    assert found == 5000 or needed[1] > num_frames


def test_frames_of_pages_are_told_to_the_runner_group_by_group() -> None:
    groups = make_groups((None, 4), num_frames=8)
    pages: Int32 = groups.alloc(3)
    groups.let_go(pages[:1])
    rows, columns, frames = groups.spread(np.array([2, 2, 2], np.int32), np.arange(3, dtype=np.int32), pages, 5)
    assert (rows.tolist(), columns.tolist()) == ([2, 2, 2, 7, 7], [0, 1, 2, 1, 2])
    assert len(set(frames.tolist())) == 5
