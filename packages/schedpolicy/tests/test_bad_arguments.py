"""Every public function answers numbers of a wrong type with the ValueError that it documents."""

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest

from pagewood.schedpolicy import (
    AdaptiveRule,
    Ageing,
    Budget,
    ByLongestMatch,
    ByShortest,
    DynamicChunk,
    InBatchDeferral,
    Quota,
    SkipAhead,
    StepModel,
    choose_victims,
    decode_first,
    order_named,
    stall_free,
    worth_preempting,
)
from pagewood.schedpolicy.simulation import (
    Decision,
    Fleet,
    Machine,
    Trace,
    TraceRequest,
    load_trace,
    policies_named,
    save_trace,
    simulate,
)
from pagewood.schedpolicy.simulation.trace import scaled
from pagewood.schedpolicy.testing import FakeRequest, check_order, random_request

np: ModuleType | None
try:
    import numpy as np
except ModuleNotFoundError:  # this package needs no NumPy; where it is installed, its numbers are tried too
    np = None

NOT_REAL: list[Any] = [None, "1", [1], float("nan"), True] + ([np.bool_(True)] if np else [])
NOT_WHOLE: list[Any] = [*NOT_REAL, 1.0, 1.5, -1] + ([np.float32(1)] if np else [])
MODEL = StepModel(base_s=0.01, prefill_s=1e-4, decode_s=1e-4, kv_s=0.0)
MACHINE = Machine(name="m", source="test", model=MODEL)
BUDGET = Budget(max_step_tokens=64, max_chunk_tokens=32, max_running=8, max_prefills=4)
REQUEST: dict[str, Any] = {"arrived_s": 0.0, "num_prompt": 8, "num_output": 2, "max_new_tokens": 4}


def request() -> FakeRequest:
    return random_request(Random(0), 0, 0.0)


COUNTS: dict[str, Callable[[Any], object]] = {
    "Budget": lambda n: Budget(max_step_tokens=n, max_chunk_tokens=1, max_running=1, max_prefills=1),
    "Budget.open": lambda n: BUDGET.open(n),
    "Budget.open decodes": lambda n: BUDGET.open(4, num_decodes=n),
    "StepBudget.take_decodes": lambda n: BUDGET.open(4).take_decodes(n),
    "decode_first": lambda n: decode_first(max_running=8, max_prefill_tokens=n),
    "stall_free": lambda n: stall_free(max_running=1, max_step_tokens=n),
    "Ageing": lambda n: Ageing(order_named("fcfs"), after_s=1.0, every=n),
    "DynamicChunk page": lambda n: DynamicChunk(MODEL, target_s=1.0, max_tokens=64, page_size=n),
    "DynamicChunk min": lambda n: DynamicChunk(MODEL, target_s=1.0, max_tokens=64, min_tokens=n),
    "DynamicChunk refit": lambda n: DynamicChunk(MODEL, target_s=1.0, max_tokens=64, refit_every=n),
    "InBatchDeferral": lambda n: InBatchDeferral[Any](min_shared=n),
    "SkipAhead": lambda n: SkipAhead(max_skipped=n, max_passes=4),
    "Quota": lambda n: Quota(max_running=n),
    "AdaptiveRule": lambda n: AdaptiveRule(min_waiting=n),
    "choose_victims": lambda n: choose_victims([request()], num_available=0, page_size=n),
    "worth_preempting": lambda n: worth_preempting(request(), [request()], n),
    "worth_preempting missing": lambda n: worth_preempting(request(), [request()], num_missing=n),
    "TraceRequest": lambda n: TraceRequest(**{**REQUEST, "num_prompt": n}),
    "Fleet": lambda n: Fleet(machine=MACHINE, num_pages=8, page_size=n),
    "Fleet replicas": lambda n: Fleet(
        machine=Machine(name="m", source="", model=MODEL), num_pages=8, page_size=1, num_replicas=n
    ),
    "Trace": lambda n: Trace(name="t", requests=(TraceRequest(**REQUEST),), block_size=n),
}
REALS: dict[str, Callable[[Any], object]] = {
    "Ageing": lambda x: Ageing(order_named("fcfs"), after_s=x),
    "ByLongestMatch": lambda x: ByLongestMatch(age_weight=x),
    "ByShortest": lambda x: ByShortest(output_ratio=x),
    "DynamicChunk": lambda x: DynamicChunk(MODEL, target_s=x, max_tokens=64),
    "StepModel": lambda x: StepModel(base_s=x, prefill_s=1e-4, decode_s=1e-4, kv_s=0.0),
    "fair_share": lambda x: order_named("fair", weights={"a": x}),
    "TraceRequest": lambda x: TraceRequest(**{**REQUEST, "arrived_s": x}),
    "scaled": lambda x: scaled(Trace(name="t", requests=(TraceRequest(**REQUEST),), block_size=4), rate=x),
}
MAY_BE_NONE = ("Quota",)


@pytest.mark.parametrize("name", COUNTS)
def test_a_number_that_is_not_whole_or_negative_is_a_value_error(name: str) -> None:
    for value in NOT_WHOLE:
        if value is None and name in MAY_BE_NONE:
            COUNTS[name](value)
            continue
        with pytest.raises(ValueError, match=r"^\w+ must "):
            pytest.fail(f"{value!r} was taken: {COUNTS[name](value)}")
    if np is not None:
        COUNTS[name](np.int64(1))


@pytest.mark.parametrize("name", REALS)
def test_what_is_not_a_number_is_a_value_error(name: str) -> None:
    for value in NOT_REAL:
        with pytest.raises(ValueError, match=r"^\w+ must "):
            pytest.fail(f"{value!r} was taken: {REALS[name](value)}")
    if np is not None:
        REALS[name](np.float64(1.0))


@pytest.mark.parametrize("keys", [(1.5,), ("a",), (None,), (True,)])
def test_keys_are_integers(keys: Any) -> None:
    with pytest.raises(ValueError, match="keys must be an integer"):
        TraceRequest(**REQUEST, keys=keys)


@pytest.mark.parametrize("policy", ["fcfs+defer", "dfs-weight", "lpm"])
@pytest.mark.parametrize("block_size", [2, 4, 16])
def test_keys_of_any_size_are_simulated_as_small_ones(policy: str, block_size: int) -> None:
    rng = Random(0)
    shared = [tuple(range(start, start + 4)) for start in (0, 10, 20)]
    small = tuple(
        TraceRequest(
            arrived_s=0.01 * number,
            num_prompt=4 * block_size + 3,
            num_output=3,
            max_new_tokens=5,
            keys=shared[number] if number < 3 else rng.choice(shared),  # in order, so that ties are decided alike
        )
        for number in range(30)
    )  # fmt: skip
    large = tuple(
        TraceRequest(
            arrived_s=one.arrived_s, num_prompt=one.num_prompt, num_output=3, max_new_tokens=5,
            keys=tuple(2**31 + 2**60 * key for key in one.keys),
        )
        for one in small
    )  # fmt: skip
    seen: list[list[Decision]] = []
    for requests in (small, large):
        decisions: list[Decision] = []
        simulate(
            Trace(name="t", requests=requests, block_size=block_size),
            Fleet(machine=MACHINE, num_pages=64, page_size=4),
            make_policies=lambda _: policies_named(policy, page_size=4),
            on_decision=decisions.append,
        )
        seen.append(decisions)
    assert any(start for decision in seen[0] for _, start, _ in decision.prompts), "nothing was found in the cache"
    assert seen[0] == seen[1]


def test_a_trace_is_read_from_a_path_in_a_string(tmp_path: Path) -> None:
    trace = Trace(name="t.jsonl", requests=(TraceRequest(**REQUEST, keys=(0, 1)),), block_size=4)
    save_trace(trace, str(tmp_path / "t.jsonl"))
    assert load_trace(str(tmp_path / "t.jsonl"), block_size=4) == trace
    (tmp_path / "huge.jsonl").write_text('{"timestamp": 1%s, "input_length": 1, "hash_ids": []}' % ("0" * 400))
    with pytest.raises(ValueError, match=r"huge\.jsonl:1: timestamp must be finite"):
        load_trace(tmp_path / "huge.jsonl")


class Wrong:
    """First come, first served, but with the errors of a list instead of those of an order."""

    def __init__(self) -> None:
        self.waiting: list[FakeRequest] = []

    def add(self, request: FakeRequest) -> None:
        assert request not in self.waiting
        self.waiting.append(request)
        self.waiting.sort(key=lambda request: request.arrival)

    def remove(self, request: FakeRequest) -> None:
        self.waiting.remove(request)

    admit = park = remove

    def stop(self, request: FakeRequest) -> None:
        pass

    def update(self, request: FakeRequest) -> None:
        self.waiting.index(request)

    def ordered(self, now_s: float) -> Iterator[FakeRequest]:
        return iter(list(self.waiting))

    def __contains__(self, request: FakeRequest) -> bool:
        return request in self.waiting

    def __len__(self) -> int:
        return len(self.waiting)


def test_an_order_that_raises_another_error_is_named_by_check_order() -> None:
    with pytest.raises(AssertionError, match="add must refuse a request that waits"):
        check_order(Wrong, Random(0))
