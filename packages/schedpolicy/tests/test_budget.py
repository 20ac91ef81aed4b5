from dataclasses import FrozenInstanceError, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewood.schedpolicy import MIXINGS, Budget, budget_named, decode_first, prefill_first, stall_free


@st.composite
def budgets(draw: st.DrawFn) -> Budget:
    max_running = draw(st.integers(1, 8))
    return Budget(
        max_step_tokens=draw(st.integers(max_running, 40)),
        max_chunk_tokens=draw(st.none() | st.integers(1, 50)),
        max_running=max_running,
        max_prefills=draw(st.integers(1, 4)),
        max_prefill_tokens=draw(st.none() | st.integers(1, 50)),
    )


@given(budgets(), st.data())
def test_every_running_request_decodes_and_no_limit_is_ever_exceeded(budget: Budget, data: st.DataObject):
    num_running = data.draw(st.integers(0, budget.max_running))
    num_decoding = data.draw(st.integers(0, num_running))
    step = budget.open(num_running)
    assert all(step.take_decode() for _ in range(num_decoding))

    prompts = data.draw(st.lists(st.integers(1, 60), max_size=12))
    continuing = num_running - num_decoding
    grants: list[int] = []
    for number, wanted in enumerate(prompts):
        if number >= continuing:
            if not step.can_admit:
                break
            step.admit()
        num_before = step.num_left
        granted = step.take_prefill(wanted)
        grants.append(granted)
        assert granted == num_before - step.num_left
        assert granted <= wanted
        if budget.max_chunk_tokens is not None:
            assert granted <= budget.max_chunk_tokens
        if number >= continuing:
            assert granted > 0, "a request that can be admitted must get tokens"

    assert num_decoding + sum(grants) + step.num_left == budget.max_step_tokens
    assert step.num_left >= 0
    assert sum(granted > 0 for granted in grants) <= budget.max_prefills
    if budget.max_prefill_tokens is not None:
        assert sum(grants) <= budget.max_prefill_tokens
    assert step.num_running <= budget.max_running


@given(budgets(), st.integers(1, 60))
def test_a_prompt_gets_the_least_of_its_wish_its_chunk_and_the_limits(budget: Budget, wanted: int):
    limits = [wanted, budget.max_step_tokens, budget.max_chunk_tokens, budget.max_prefill_tokens]
    assert budget.open(0).take_prefill(wanted) == min(limit for limit in limits if limit is not None)


@given(budgets(), st.lists(st.integers(1, 60), max_size=8))
def test_an_offer_takes_nothing_and_equals_what_is_then_taken(budget: Budget, prompts: list[int]):
    step = budget.open(0)
    for wanted in prompts:
        before = (step.num_left, step.num_prefills)
        offered = step.offer_prefill(wanted)
        assert (step.num_left, step.num_prefills) == before
        assert step.take_prefill(wanted) == offered


@given(budgets(), st.lists(st.integers(1, 20), max_size=30))
def test_a_decode_takes_all_of_its_tokens_or_none(budget: Budget, wanted: list[int]):
    step = budget.open(0)
    for n in wanted:
        num_before = step.num_left
        was_taken = step.take_decode(n)
        assert was_taken == (n <= num_before)
        assert step.num_left == (num_before - n if was_taken else num_before)


def test_several_prompts_share_a_step_with_decodes():
    step = Budget(max_step_tokens=100, max_chunk_tokens=40, max_running=16, max_prefills=3).open(10)
    assert all(step.take_decode() for _ in range(10))
    assert [step.take_prefill(1000), step.take_prefill(30), step.take_prefill(1000)] == [40, 30, 20]
    assert step.num_left == 0
    assert not step.can_admit


def test_no_more_than_max_prefills_prompts_are_computed_in_a_step():
    step = Budget(max_step_tokens=100, max_chunk_tokens=10, max_running=16, max_prefills=2).open(0)
    assert [step.take_prefill(50) for _ in range(3)] == [10, 10, 0]
    assert not step.can_admit
    assert step.num_left == 80


def test_prompts_share_a_step_until_those_that_end_in_it_are_enough():
    budget = Budget(max_step_tokens=100, max_chunk_tokens=None, max_running=8, max_prefills=8, joint_prefill_tokens=20)
    step = budget.open(0)
    assert step.take_prefill(30, ends=False) == 30  # a prompt that goes on keeps no other from ending
    assert step.take_prefill(19) == 19
    assert step.can_admit
    assert step.take_prefill(7) == 7  # whole, although 20 are passed
    assert not step.can_admit
    assert step.offer_prefill(1) == step.take_prefill(1) == 0
    assert step.take_decode()
    assert budget.open(0).can_admit


def test_a_prompt_that_gets_nothing_uses_up_no_prefill():
    step = Budget(max_step_tokens=4, max_chunk_tokens=None, max_running=4, max_prefills=2).open(0)
    assert step.take_decode(4)
    assert [step.take_prefill(5), step.num_prefills] == [0, 0]


def test_places_run_out():
    step = Budget(max_step_tokens=100, max_chunk_tokens=None, max_running=2, max_prefills=9).open(1)
    assert step.can_admit
    step.admit()
    assert not step.can_admit
    with pytest.raises(RuntimeError, match=r"num_running must stay <= max_running \(2\)"):
        step.admit()


def test_steps_of_one_budget_are_independent():
    budget = Budget(max_step_tokens=8, max_chunk_tokens=None, max_running=8, max_prefills=1)
    budget.open(0).take_prefill(8)
    assert budget.open(0).num_left == 8
    with pytest.raises(FrozenInstanceError):
        budget.max_running = 9  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    "name",
    [
        "max_step_tokens",
        "max_chunk_tokens",
        "max_running",
        "max_prefills",
        "max_prefill_tokens",
        "joint_prefill_tokens",
    ],
)
def test_limits_are_at_least_one(name: str):
    limits = {"max_step_tokens": 8, "max_chunk_tokens": 8, "max_running": 8, "max_prefills": 8, name: 0}
    with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0"):
        Budget(**limits)  # pyright: ignore[reportArgumentType]


def test_a_step_must_hold_a_decode_of_every_running_request():
    with pytest.raises(ValueError, match=r"max_step_tokens must be >= max_running \(9\), got 8"):
        Budget(max_step_tokens=8, max_chunk_tokens=None, max_running=9, max_prefills=1)


def test_arguments_of_a_step_are_checked():
    budget = Budget(max_step_tokens=8, max_chunk_tokens=None, max_running=8, max_prefills=1)
    with pytest.raises(ValueError, match=r"num_running must be in \[0, 8\], got 9"):
        budget.open(9)
    with pytest.raises(ValueError, match=r"num_running must be in \[0, 8\], got -1"):
        budget.open(-1)
    with pytest.raises(ValueError, match="n must be >= 1, got 0"):
        budget.open(0).take_decode(0)
    with pytest.raises(ValueError, match="wanted must be >= 0, got -1"):
        budget.open(0).take_prefill(-1)


def test_a_prompt_that_is_wholly_cached_takes_nothing():
    step = Budget(max_step_tokens=8, max_chunk_tokens=None, max_running=8, max_prefills=1).open(0)
    assert (step.offer_prefill(0), step.take_prefill(0)) == (0, 0)
    assert (step.num_left, step.num_prefills, step.can_admit) == (8, 0, True)


def test_prompts_that_come_first_do_not_take_tokens_kept_for_decodes():
    step = Budget(max_step_tokens=16, max_chunk_tokens=None, max_running=8, max_prefills=8).open(5, num_decodes=5)
    assert step.take_prefill(100) == 11
    assert not step.can_admit
    assert [step.take_decode() for _ in range(6)] == [True] * 5 + [False]


def test_no_token_is_kept_for_a_decode_that_was_taken():
    step = Budget(max_step_tokens=16, max_chunk_tokens=None, max_running=8, max_prefills=8).open(5, num_decodes=5)
    assert step.take_decode(3)
    assert step.offer_prefill(100) == 16 - 3 - 4


def test_a_step_can_limit_its_prompts():
    step = decode_first(max_running=8, max_prefill_tokens=100).open(4, max_prefill_tokens=30)
    assert step.can_admit
    assert step.take_prefill(20) == 20
    assert step.take_prefill(20) == 10
    assert step.take_prefill(20) == 0
    assert not step.can_admit
    assert step.take_decode()


def test_all_prompts_of_a_step_share_the_chunk():
    step = decode_first(max_running=64, max_prefill_tokens=512).open(0)
    assert [step.take_prefill(400), step.take_prefill(400)] == [400, 112]
    assert not step.can_admit
    for num_running in range(64):
        step = decode_first(max_running=64, max_prefill_tokens=512).open(num_running)
        assert all(step.take_decode() for _ in range(num_running))
        assert step.take_prefill(400) + step.take_prefill(400) == 512


def test_a_step_can_lower_the_limit_of_its_prompts_and_not_raise_it():
    budget = decode_first(max_running=8, max_prefill_tokens=100)
    assert budget.open(0, max_prefill_tokens=30).offer_prefill(1000) == 30
    assert budget.open(0, max_prefill_tokens=107).offer_prefill(1000) == 100


def test_a_planner_can_see_that_prompts_go_first():
    step = prefill_first(max_running=4, max_prefill_tokens=100).open(2)
    assert step.budget.prefill_first
    assert step.take_prefill(10) == 10
    assert not step.take_decode()


def test_decode_first_never_stalls_a_running_request():
    step = decode_first(max_running=4, max_prefill_tokens=100).open(4)
    assert all(step.take_decode() for _ in range(4))
    assert step.take_prefill(1000) == 100


def test_prefill_first_computes_prompts_alone_and_whole():
    budget = prefill_first(max_running=4, max_prefill_tokens=100)
    step = budget.open(2, num_decodes=2)
    assert step.take_prefill(90) == 90
    assert step.take_prefill(90) == 10
    assert not step.take_decode()
    step = budget.open(2, num_decodes=2)
    assert [step.take_decode(), step.take_decode()] == [True, True]


def test_the_arguments_of_a_step_are_checked():
    budget = decode_first(max_running=4, max_prefill_tokens=100)
    for arguments, message in (
        ({"num_running": 5}, r"num_running must be in \[0, 4\], got 5"),
        ({"num_running": 3, "num_decodes": 4}, r"num_decodes must be in \[0, num_running \(3\)\], got 4"),
        ({"num_running": 3, "max_prefill_tokens": -1}, "max_prefill_tokens must be >= 0, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            budget.open(**arguments)
    with pytest.raises(ValueError, match="max_prefill_tokens must be >= 1, got 0"):
        decode_first(max_running=4, max_prefill_tokens=0)


def test_presets():
    assert decode_first(max_running=4, max_prefill_tokens=1) == Budget(
        max_step_tokens=5, max_chunk_tokens=1, max_running=4, max_prefills=8, max_prefill_tokens=1
    )
    assert prefill_first(max_running=4) == Budget(
        max_step_tokens=16_384, max_chunk_tokens=None, max_running=4, max_prefills=4, prefill_first=True
    )


def test_a_step_may_allow_no_prompts():
    step = decode_first(max_running=4, max_prefill_tokens=100).open(1, max_prefill_tokens=0)
    assert step.offer_prefill(5) == 0
    assert not step.can_admit
    assert step.take_decode()
    assert decode_first(max_running=4, max_prefill_tokens=100).open(1, max_prefill_tokens=1).can_admit


def test_decodes_are_taken_together_as_one_by_one():
    rng = Random(0)
    for _ in range(300):
        budget = Budget(
            max_step_tokens=rng.randint(8, 20),
            max_chunk_tokens=None,
            max_running=8,
            max_prefills=2,
            prefill_first=rng.random() < 0.3,
        )
        num_running = rng.randint(0, 8)
        together = budget.open(num_running, num_decodes=rng.randint(0, num_running))
        single = replace(together)
        wanted = rng.choice((0, 3, 30))
        assert together.take_prefill(wanted) == single.take_prefill(wanted)
        count = rng.randint(0, 20)
        assert together.take_decodes(count) == sum(single.take_decode() for _ in range(count))
        assert together == single
    with pytest.raises(ValueError, match="num_requests must be >= 0, got -1"):
        decode_first(max_running=1, max_prefill_tokens=1).open(0).take_decodes(-1)


@pytest.mark.parametrize(("name", "num_prefill"), [("decode-first", 64), ("stall-free", 54), ("prefill-first", 64)])
def test_prompt_tokens_beside_ten_decodes(name: str, num_prefill: int):
    step = budget_named(name, max_running=16, max_prefill_tokens=64, max_prefills=2).open(10)
    assert step.budget.prefill_first == (name == "prefill-first")
    if not step.budget.prefill_first:
        assert step.take_decodes(10) == 10
    assert step.take_prefill(1000) == num_prefill
    assert step.take_prefill(1000) == 0
    if step.budget.prefill_first:
        assert not step.take_decode()


def test_prompts_progress_beside_more_decodes_than_the_step_has_tokens():
    step = stall_free(max_running=256, max_step_tokens=64).open(256)
    assert step.take_decodes(256) == 256
    assert step.take_prefill(1000) == 8
    few = stall_free(max_running=256, max_step_tokens=64).open(1)
    few.take_decodes(1)
    assert few.take_prefill(1000) == 64  # never more prompt tokens than the step is to have


def test_prompts_share_a_step():
    for name in MIXINGS:
        step = budget_named(name, max_running=16, max_prefill_tokens=64, max_prefills=2).open(0)
        assert [step.take_prefill(10) for _ in range(3)] == [10, 10, 0]


def test_limits_are_checked():
    with pytest.raises(ValueError, match="name must be one of decode-first, stall-free, prefill-first, got 'x'"):
        budget_named("x", max_running=1, max_prefill_tokens=1)
    for name in MIXINGS:
        with pytest.raises(ValueError, match="must be >= 1, got 0"):
            budget_named(name, max_running=1, max_prefill_tokens=0)
