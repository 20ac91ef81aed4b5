"""The order in which prompts are tokenized."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pagewood.server.stages.turns import Turns

NAMES = st.sampled_from("abc")


@given(st.lists(st.one_of(st.tuples(NAMES, NAMES), st.none())))
def test_no_item_waits_for_two_of_another_group(steps: list[tuple[str, str] | None]) -> None:
    """Put items of (tenant, group), and take one where a step is None; at the end take all."""
    turns: Turns[tuple[str, str, int]] = Turns()
    waiting: list[tuple[str, str, int]] = []
    passed: dict[tuple[str, str, int], list[tuple[str, str, int]]] = {}
    for number, step in enumerate([*steps, *[None] * len(steps)]):
        if step is not None:
            item = (*step, number)
            turns.put(item, tenant=step[0], group=step[1])
            waiting.append(item)
            passed[item] = []
        elif waiting:
            taken = turns.pop()
            waiting.remove(taken)
            for item in waiting:
                passed[item].append(taken)
            assert not any(item[:2] == taken[:2] and item < taken for item in waiting)  # the oldest of its group
            most = 1 + sum(one[:2] == taken[:2] for one in passed[taken])
            others = Counter(one[:2] for one in passed[taken] if one[0] == taken[0] and one[1] != taken[1])
            assert all(number <= most for number in others.values())
            own = 1 + sum(one[0] == taken[0] for one in passed[taken])
            tenants = Counter(one[0] for one in passed[taken] if one[0] != taken[0])
            assert all(number <= own for number in tenants.values())
        assert len(turns) == len(waiting)


def test_items_of_groups_with_one_item_keep_their_order() -> None:
    turns: Turns[int] = Turns()
    for number in range(5):
        turns.put(number, tenant="", group=str(number))
    assert [turns.pop() for _ in range(5)] == list(range(5))
