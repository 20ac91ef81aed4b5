import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagewood.schedpolicy.simulation.cache import BlockCache, MatchWatch

PATHS = [(1, 2, 3, 4), (1, 2, 5, 6), (1, 7), (8, 9, 10), (8, 11)]


class NaiveTree:
    """Pages by key; every method looks at all of them."""

    def __init__(self) -> None:
        self.before: dict[int, int | None] = {}
        self.used: dict[int, int] = {}
        self.locks: list[tuple[int, ...]] = []
        self.now = 0

    def use(self, keys: tuple[int, ...]) -> None:
        self.now += 1
        self.used.update(dict.fromkeys(keys, self.now))

    def locked(self) -> set[int]:
        return {key for keys in self.locks for key in keys}

    def evict(self) -> bool:
        inner = set(self.before.values())
        leaves = [key for key in self.before if key not in inner and key not in self.locked()]
        if leaves:
            oldest = min(leaves, key=self.used.__getitem__)
            del self.before[oldest], self.used[oldest]
        return bool(leaves)


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cache, self.naive = BlockCache(), NaiveTree()
        self.watches: list[MatchWatch] = []

    @rule(keys=st.sampled_from(PATHS), num=st.integers(0, 4))
    def insert(self, keys: tuple[int, ...], num: int) -> None:
        keys = keys[:num]
        num_new = sum(key not in self.naive.before for key in keys)
        assert self.cache.insert(keys, len(keys)) == num_new
        self.naive.before.update({key: keys[place - 1] if place else None for place, key in enumerate(keys)})
        self.naive.use(keys)

    @rule(keys=st.sampled_from(PATHS))
    def lock(self, keys: tuple[int, ...]) -> None:
        num = self.cache.match(keys)
        self.cache.lock(keys, num)
        self.naive.locks.append(keys[:num])

    @precondition(lambda self: self.naive.locks)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        keys = self.naive.locks.pop(data.draw(st.integers(0, len(self.naive.locks) - 1)))
        self.cache.unlock(keys, len(keys))
        self.naive.use(keys)

    @rule(num=st.integers(0, 5))
    def evict(self, num: int) -> None:
        assert self.cache.evict(num) == sum(self.naive.evict() for _ in range(num))

    @rule(keys=st.sampled_from(PATHS))
    def watch(self, keys: tuple[int, ...]) -> None:
        self.watches.append(self.cache.watch(keys, lambda: None))

    @precondition(lambda self: self.watches)
    @rule(data=st.data())
    def unwatch(self, data: st.DataObject) -> None:
        self.cache.unwatch(self.watches.pop(data.draw(st.integers(0, len(self.watches) - 1))))

    @invariant()
    def agree(self) -> None:
        assert self.cache.num_pages == len(self.naive.before)
        assert self.cache.num_evictable == len(self.naive.before) - len(self.naive.locked())
        for keys in PATHS:
            assert self.cache.match(keys) == next(
                (place for place, key in enumerate(keys) if key not in self.naive.before), len(keys)
            )
        for watch in self.watches:
            assert watch.num_pages == self.cache.match(watch.keys)


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=100, stateful_step_count=40)


def test_a_watch_reports_every_change_and_nothing_else():
    reported: list[int] = []
    cache = BlockCache()
    watch = cache.watch((1, 2, 3), lambda: reported.append(watch.num_pages))
    cache.insert((1, 2), 2)
    cache.insert((7, 8), 2)
    cache.evict(1)
    cache.unwatch(watch)
    cache.insert((1, 2, 3), 3)
    assert reported == [2, 1]


@pytest.mark.parametrize("num", [0, 3])
def test_nothing_is_evicted_from_nothing(num: int):
    assert BlockCache().evict(num) == 0


def test_the_memory_of_a_cache_does_not_grow_with_its_uses():
    cache = BlockCache()
    for _ in range(5000):
        for path in PATHS[:3]:
            cache.insert(path, len(path))
            cache.lock(path, len(path))
            cache.unlock(path, len(path))
    assert len(cache._leaves) < 200  # pyright: ignore[reportPrivateUsage]
    assert cache.evict(100) == 7
