"""How the tokens of a grant change its request."""

from typing import cast

import numpy as np
import pytest

from pagewood.engine.api import Delta, FinishReason
from pagewood.engine.core.messages.result import EXCLUDED, StepResult
from pagewood.engine.core.queue.state import EngineState
from pagewood.engine.core.retire import retire
from pagewood.engine.core.steps.grant import Grant
from pagewood.engine.grammar.matcher import Matcher
from pagewood.schedpolicy import deserving
from parts import make_queue, make_request, make_space


def retire_one(tokens: list[int], *, max_new: int = 8, stop_ids: frozenset[int] = frozenset()) -> tuple[Delta, int]:
    """Retire a step in which a request of three prompt tokens yields `tokens`; return the answer and the free rows."""
    kv = make_space()
    state = EngineState(waiting=make_queue(kv), rank=deserving)
    request = make_request([1, 2, 3], max_new=max_new)
    request.stop_ids = stop_ids
    state.by_id[request.request_id] = request
    assert kv.admit(request, max_tokens=3, num_reserved=0) == 3
    state.run(request)
    result = StepResult(tokens=np.array(tokens, np.int32), counts=np.array([len(tokens)], np.int32))
    (delta,) = retire(state, kv, [Grant(request, 0, 3, 4)], result)
    assert request.tokens[3 : request.num_known].tolist() == tokens[: request.num_known - 3]
    return delta, kv.num_free_rows


def test_all_tokens_of_a_grant_are_answered_at_once() -> None:
    delta, num_free_rows = retire_one([7, 8, 9])
    assert (delta.tokens, delta.finish, delta.num_output_tokens, num_free_rows) == ((7, 8, 9), None, 3, 3)


def test_tokens_after_a_stop_token_are_dropped() -> None:
    delta, num_free_rows = retire_one([7, 8, 9], stop_ids=frozenset([8]))
    assert (delta.tokens, delta.finish, delta.num_output_tokens) == ((7,), FinishReason.STOP, 2)
    assert num_free_rows == 4


def test_tokens_after_max_tokens_are_dropped() -> None:
    delta, num_free_rows = retire_one([7, 8, 9], max_new=2)
    assert (delta.tokens, delta.finish, delta.num_output_tokens) == ((7, 8), FinishReason.LENGTH, 2)
    assert num_free_rows == 4


def test_a_stop_token_at_the_limit_is_a_stop() -> None:
    delta, _ = retire_one([7, 8], max_new=2, stop_ids=frozenset([8]))
    assert (delta.tokens, delta.finish) == ((7,), FinishReason.STOP)


def test_a_grant_that_yields_nothing_ends_its_request_with_an_error() -> None:
    delta, num_free_rows = retire_one([])
    assert (delta.tokens, delta.finish, num_free_rows) == ((), FinishReason.ERROR, 4)
    assert delta.refusal is not None
    assert delta.refusal.message.startswith("the logits of this request are not numbers")


def test_no_kv_is_computed_behind_a_foreseen_token() -> None:
    """Its step was planned behind drafts that were rejected, whose KV is still there: that must not be published."""
    kv = make_space()
    state = EngineState(waiting=make_queue(kv), rank=deserving)
    request = make_request([1, 2, 3], max_new=8)
    state.by_id[request.request_id] = request
    assert kv.admit(request, max_tokens=3, num_reserved=0) == 3
    state.run(request)
    request.tokens[3:6] = [7, 8, 9]  # 7 was drawn; the grammar forces 8, which a step will draw, and 9
    request.num_known, request.num_computed, request.num_foreseen = 6, 3, 1
    result = StepResult(tokens=np.array([8], np.int32), counts=np.array([1], np.int32))
    assert retire(state, kv, [Grant(request, 5, 1, 1)], result) == []
    assert request.num_computed == 4


class Matching:
    """A matcher of which retiring reads the end only."""

    def __init__(self, *, is_finished: bool) -> None:
        self.is_finished = is_finished


@pytest.mark.parametrize(
    ("matcher", "finish", "code"),
    [
        (None, FinishReason.ERROR, "all_tokens_excluded"),
        (Matching(is_finished=False), FinishReason.ERROR, "all_tokens_excluded"),
        (Matching(is_finished=True), FinishReason.STOP, None),
    ],
)
def test_where_every_token_is_excluded_the_request_ends(
    matcher: Matching | None, finish: FinishReason, code: str | None
) -> None:
    """A grammar that is finished excludes all, too, if no token ends the request."""
    kv = make_space()
    state = EngineState(waiting=make_queue(kv), rank=deserving)
    request = make_request([1, 2, 3])
    request.matcher = cast("Matcher | None", matcher)
    state.num_constrained = matcher is not None
    state.by_id[request.request_id] = request
    assert kv.admit(request, max_tokens=3, num_reserved=0) == 3
    state.run(request)
    result = StepResult.of_one_each(np.array([EXCLUDED], np.int32))
    (delta,) = retire(state, kv, [Grant(request, 0, 3, 1)], result)
    assert (delta.tokens, delta.finish) == ((), finish)
    assert (delta.refusal.code if delta.refusal else None) == code


def test_marks_of_tokens_say_why_there_is_none() -> None:
    result = StepResult.of_one_each(np.array([4, EXCLUDED, -1, 5, EXCLUDED], np.int32))
    assert result.tokens.tolist() == [4, 5]
    assert result.counts.tolist() == [1, 0, 0, 1, 0]
    assert list(result.excluded) == [1, 4]


@pytest.mark.parametrize("num_unknown", [0, 2])
def test_each_grant_gets_its_own_tokens(num_unknown: int) -> None:
    kv = make_space(num_rows=8)
    state = EngineState(waiting=make_queue(kv), rank=deserving)
    grants: list[Grant] = []
    for arrival in range(3):
        request = make_request([arrival] * 3, arrival=arrival)
        state.by_id[request.request_id] = request
        assert kv.admit(request, max_tokens=3, num_reserved=0) == 3
        state.run(request)
        grants.append(Grant(request, 0, 3, 0 if arrival == 1 else 2))
    tokens, counts = ([5, 6, 7], [2, 1]) if num_unknown == 0 else ([7], [0, 1])
    result = StepResult(tokens=np.array(tokens, np.int32), counts=np.array(counts, np.int32))
    deltas = {delta.request_id: delta.tokens for delta in retire(state, kv, grants, result)}
    assert deltas == ({"0": (5, 6), "2": (7,)} if num_unknown == 0 else {"0": (), "2": (7,)})


@pytest.mark.parametrize(("token", "num_cached"), [([7], 1), ([], 0)])
def test_kv_behind_logits_that_are_not_numbers_is_not_published(token: list[int], num_cached: int) -> None:
    kv = make_space()
    state = EngineState(waiting=make_queue(kv), rank=deserving)
    request = make_request([1, 2, 3, 4, 5], max_new=1)
    state.by_id[request.request_id] = request
    assert kv.admit(request, max_tokens=5, num_reserved=0) == 5
    state.run(request)
    result = StepResult(tokens=np.array(token, np.int32), counts=np.array([len(token)], np.int32))
    retire(state, kv, [Grant(request, 0, 5, 1)], result)
    assert (kv.num_free_rows, kv.num_cached, kv.violation(())) == (4, num_cached, None)
