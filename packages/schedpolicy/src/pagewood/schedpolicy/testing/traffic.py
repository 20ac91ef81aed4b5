"""Random traffic through an order, with the checks that must hold for every order."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import Any

from pagewood.schedpolicy.orders.order import Order
from pagewood.schedpolicy.testing.requests import FakeRequest, random_request

AnyOrder = Order[Any]


@dataclass(slots=True, kw_only=True)
class Traffic:
    """Random calls of two orders that should agree.

    It does what an engine can do: requests arrive, are aborted, change while they wait, are parked and return, are
    admitted from the front of a pass or past some of it, generate, end, or are preempted and return.

    Invariant: `waiting`, `running` and `parked` agree with the calls so far.
    """

    order: AnyOrder
    oracle: AnyOrder
    rng: Random
    max_waiting: int = 12
    notifies: bool = True
    """Whether every change of a match is reported by `update`."""
    now_s: float = 0.0  # written by: step
    num_arrivals: int = 0  # written by: _arrive
    waiting: dict[int, FakeRequest] = field(default_factory=dict[int, FakeRequest])  # written by: step and its parts
    running: dict[int, FakeRequest] = field(default_factory=dict[int, FakeRequest])  # written by: step and its parts
    parked: dict[int, FakeRequest] = field(default_factory=dict[int, FakeRequest])  # written by: step and its parts

    def step(self) -> None:
        """Advance the time, and do one random action.

        Raises:
            AssertionError: The orders differ, or one of them does not yield exactly the waiting requests.
        """
        self.now_s += self.rng.choice((0.0, 0.1, 3.0))
        actions = [self._arrive, self._arrive, self._pass, self._pass, self._change, self._generate]
        if self.waiting:
            actions += [self._abort, self._park]
        if self.parked:
            actions += [self._unpark, self._unpark, self._abort_parked]
        if self.running:
            actions += [self._end, self._preempt]
        self.rng.choice(actions)()
        self._compare_sizes()

    def _each(self, call: Callable[[AnyOrder], object]) -> None:
        call(self.order)
        call(self.oracle)

    def _arrive(self) -> None:
        if len(self.waiting) < self.max_waiting:
            request = random_request(self.rng, self.num_arrivals, self.now_s)
            self.num_arrivals += 1
            self.waiting[request.arrival] = request
            self._each(lambda order: order.add(request))

    def _abort(self) -> None:
        request = self.waiting.pop(self.rng.choice(list(self.waiting)))
        self._each(lambda order: order.remove(request))

    def _park(self) -> None:
        request = self.waiting.pop(self.rng.choice(list(self.waiting)))
        self.parked[request.arrival] = request
        self._each(lambda order: order.park(request))

    def _unpark(self) -> None:
        request = self.parked.pop(self.rng.choice(list(self.parked)))
        request.num_matched = self.rng.randrange(request.num_tokens)
        if self.rng.random() < 0.3:
            self._change_attributes(request)
        self.waiting[request.arrival] = request
        self._each(lambda order: order.add(request))

    def _abort_parked(self) -> None:
        request = self.parked.pop(self.rng.choice(list(self.parked)))
        self._each(lambda order: order.stop(request))

    def _change(self) -> None:
        """Change matches, as a cache does, and sometimes the attributes that a client may change."""
        for request in self.waiting.values():
            if self.rng.random() < 0.3:
                request.num_matched = self.rng.randrange(request.num_tokens)
                if self.notifies:
                    self._each(lambda order, request=request: order.update(request))
        if self.waiting and self.rng.random() < 0.5:
            request = self.rng.choice(list(self.waiting.values()))
            self._change_attributes(request)
            self._each(lambda order: order.update(request))

    def _change_attributes(self, request: FakeRequest) -> None:
        fresh = random_request(self.rng, request.arrival, self.now_s)
        request.priority, request.deadline_s = fresh.priority, fresh.deadline_s
        request.service_class, request.tag, request.tenant = fresh.service_class, fresh.tag, fresh.tenant

    def _pass(self) -> None:
        """Compare one pass, in whole or in part, and admit some of the yielded requests."""
        num_taken = self.rng.choice((1, 3, len(self.waiting)))
        taken = list(islice(self.order.ordered(self.now_s), num_taken))
        expected = list(islice(self.oracle.ordered(self.now_s), num_taken))
        arrivals = [request.arrival for request in taken]
        assert len(taken) == min(num_taken, len(self.waiting)), f"{arrivals} lacks some of {list(self.waiting)}"
        assert len(set(arrivals)) == len(arrivals), f"{arrivals} has a request twice"
        assert all(self.waiting.get(request.arrival) is request for request in taken), (
            f"{arrivals} has a request that has left"
        )
        assert arrivals == [request.arrival for request in expected], "the order differs from the expected one"
        num_skipped = self.rng.choice((0, 0, 0, 1))
        for request in taken[num_skipped : num_skipped + self.rng.randint(0, 3)]:
            del self.waiting[request.arrival]
            self.running[request.arrival] = request
            self._each(lambda order, request=request: order.admit(request))

    def _generate(self) -> None:
        for request in self.running.values():
            num_new = self.rng.randint(0, 2)
            request.num_generated += num_new
            request.num_tokens += num_new

    def _end(self) -> None:
        request = self.running.pop(self.rng.choice(list(self.running)))
        self._each(lambda order: order.stop(request))

    def _preempt(self) -> None:
        request = self.running.pop(self.rng.choice(list(self.running)))
        self.waiting[request.arrival] = request
        self._each(lambda order: order.stop(request))
        self._each(lambda order: order.add(request))

    def _compare_sizes(self) -> None:
        for order in (self.order, self.oracle):
            assert len(order) == len(self.waiting), f"len is {len(order)}, but {len(self.waiting)} wait"
            assert all(request in order for request in self.waiting.values()), "a waiting request is not in the order"
            assert not any(request in order for request in self.running.values()), "a running request is in the order"
            assert not any(request in order for request in self.parked.values()), "a parked request is in the order"


def check_same_order(
    order: AnyOrder, oracle: AnyOrder, rng: Random, *, num_steps: int = 40, notifies: bool = True
) -> None:
    """Check that two empty orders agree in every pass of random traffic, and yield each waiting request once.

    Args:
        order: The order to check.
        oracle: An order that is known to be right.
        rng: Generator for the traffic.
        num_steps: Length of the traffic.
        notifies: Whether `update` is called on every change of a match.

    Raises:
        AssertionError: The orders differ.
    """
    traffic = Traffic(order=order, oracle=oracle, rng=rng, notifies=notifies)
    for _ in range(num_steps):
        traffic.step()


def check_order(make_order: Callable[[], AnyOrder], rng: Random, *, num_steps: int = 40) -> None:
    """Check that orders satisfy `Order`: permutations, the same result for the same calls, and its errors.

    Raises:
        AssertionError: An order does not.
    """
    check_same_order(make_order(), make_order(), rng, num_steps=num_steps)
    order = make_order()
    first, second = random_request(rng, 0, 0.0), random_request(rng, 1, 0.0)
    order.add(first)
    assert _raises(ValueError, lambda: order.add(first)), "add must refuse a request that waits"
    assert _raises(KeyError, lambda: order.remove(second)), "remove must refuse a request that does not wait"
    assert _raises(KeyError, lambda: order.admit(second)), "admit must refuse a request that does not wait"
    assert _raises(KeyError, lambda: order.park(second)), "park must refuse a request that does not wait"
    assert _raises(KeyError, lambda: order.update(second)), "update must refuse a request that does not wait"
    order.stop(first)
    order.stop(second)
    assert list(order.ordered(1.0)) == [first], "a refused call must change nothing"


def _raises(kind: type[Exception], call: Callable[[], object]) -> bool:
    """Return whether a call raises an exception of this kind; any other one does not count, and is not passed on."""
    try:
        call()
    except Exception as error:
        return isinstance(error, kind)
    return False
