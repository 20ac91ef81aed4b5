"""Shares few slots among requests that need one of many things, such as adapters, so that no set of them starves."""

from collections.abc import Container, Hashable, Iterable
from typing import Any, Protocol

from pagewood.schedpolicy.counts import require_count


class HasArrival(Protocol):
    """A request with an arrival number."""

    @property
    def arrival(self) -> int:
        """Unique, ascending in the order of arrival."""
        ...


class SlotShares:
    """Decides which requests may run, where those with the same key share a slot, and there are few slots.

    A key holds a slot while any of its requests runs. Without a bound, keys that hold all slots could be admitted
    again and again, and a request with another key would wait for ever. Invariant: when `max_passes` later requests
    with other keys have been admitted past a request that lacks a slot, its key is owed one. It gets the first that is
    free; if there is none, no more requests are admitted of the key with the fewest running ones (it drains), whose
    slot becomes free when these have ended. Keys get slots in the order in which they became owed.

    In every step call `begin_step`; then, for each request in the order of admission, `may_admit`, and `admitted` if it
    is. Call `stopped` when a request ends or is preempted.

    Source: the drain rule of SGLang's LoRA scheduler, here with a bound.
    """

    __slots__ = ("_draining", "_held", "_owed", "_passed", "_pinned", "max_passes", "num_slots")

    def __init__(self, num_slots: int, *, max_passes: int) -> None:
        """Start with all slots free.

        Args:
            num_slots: Keys that may run at the same time.
            max_passes: Admissions past a request that lacks a slot.

        Raises:
            ValueError: `num_slots` is below 1, or `max_passes` is negative.
        """
        require_count("num_slots", num_slots, least=1)
        require_count("max_passes", max_passes, least=0)
        self.num_slots = num_slots
        self.max_passes = max_passes
        self._held: dict[Hashable, int] = {}
        """Running requests of each key with any."""  # written by: admitted, stopped
        self._pinned: set[Hashable] = set()  # written by: pin
        self._passed: dict[int, tuple[HasArrival, Hashable, int]] = {}
        """Requests that lack a slot: by arrival, with their key and how many have passed them."""
        # written by: begin_step, may_admit, admitted
        self._owed: list[Hashable] = []
        """Keys that are owed a slot, in the order in which they became so."""  # written by: slots
        self._draining: set[Hashable] = set()  # written by: slots

    @property
    def num_draining(self) -> int:
        """Keys of which no more requests are admitted, because another is owed a slot."""
        return len(self._draining)

    def pin(self, keys: Iterable[Hashable]) -> None:
        """Let these keys, and no others, hold a slot at all times.

        Raises:
            ValueError: No slot would be left for others.
        """
        pinned = set(keys)
        if len(pinned) >= self.num_slots:
            raise ValueError(f"keys must be fewer than the {self.num_slots} slots, got {len(pinned)}")
        self._pinned = pinned
        self._settle()

    def begin_step(self, waiting: Container[Any]) -> None:
        """Forget requests that are no longer waiting."""
        if self._passed:
            self._passed = {arrival: entry for arrival, entry in self._passed.items() if entry[0] in waiting}
            self._settle()

    def may_admit(self, request: HasArrival, key: Hashable) -> bool:
        """Return whether a request may run now; if not, those admitted from now on pass it."""
        if key in self._held and key not in self._draining:
            return True
        if key in self._pinned and self._num_free >= 0:
            return True
        if key not in self._held and key not in self._pinned and self._num_free > self._num_owed_before(key):
            return True
        self._passed.setdefault(request.arrival, (request, key, 0))
        if self.max_passes == 0:
            self._settle()
        return False

    def admitted(self, request: HasArrival, key: Hashable) -> None:
        """Note that a request runs; `may_admit` has allowed it."""
        self._passed.pop(request.arrival, None)
        self._held[key] = self._held.get(key, 0) + 1
        for arrival, (other, its_key, num) in self._passed.items():
            if arrival < request.arrival and its_key != key:
                self._passed[arrival] = other, its_key, num + 1
        self._settle()

    def stopped(self, key: Hashable) -> None:
        """Note that a running request has ended or was preempted."""
        self._held[key] -= 1
        if not self._held[key]:
            del self._held[key]
        self._settle()

    @property
    def _num_free(self) -> int:
        """Return the slots that no key holds, less those kept for pinned keys; negative just after some were pinned."""
        return self.num_slots - len(self._pinned) - len(self._held.keys() - self._pinned)

    def _num_owed_before(self, key: Hashable) -> int:
        """Return how many keys must get a free slot before this one."""
        return self._owed.index(key) if key in self._owed else len(self._owed)

    def _settle(self) -> None:
        """Bring up to date which keys are owed a slot and which drain."""
        owing = {key for _, key, num in self._passed.values() if num >= self.max_passes}
        owing -= self._pinned | (self._held.keys() - self._draining)
        late = sorted((entry for entry in self._passed.values() if entry[1] in owing), key=lambda one: one[0].arrival)
        self._owed = list(dict.fromkeys([*(key for key in self._owed if key in owing), *(key for _, key, _ in late)]))
        self._draining &= self._held.keys() - self._pinned
        wanted = [key for key in self._owed if key not in self._held]
        num_lacking = len(wanted) - self._num_free - len(self._draining)
        if num_lacking < 0 and self._draining:
            for key in sorted(self._draining, key=lambda key: -self._held[key])[:-num_lacking]:
                self._draining.discard(key)
        candidates = [key for key in self._held if key not in self._draining and key not in self._pinned]
        for key in sorted(candidates, key=lambda key: self._held[key])[: max(0, num_lacking)]:
            self._draining.add(key)
