"""Layers are divided into groups of equal size, each layer once, with little padding."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewood.kvpool import LayerGroups


@pytest.mark.parametrize(
    ("windows", "num_layers", "expected"),
    [
        ([None] * 5, 5, (None,)),
        ([8] * 5, 5, (8,)),
        ([8, None] * 4, 4, (None, 8)),
        (([8] * 5 + [None]) * 8, 8, (None, 8, 8, 8, 8, 8)),
        ([8] * 22 + [None] * 4, 4, (None, *[8] * 6)),  # two places hold nothing
        ([8, 8, 8, 8, None, None, None], 1, (None, None, None, 8, 8, 8, 8)),  # larger groups would have more
        ([4, 8, None], 1, (None, 8, 8)),
        ([100, None], 2, (None,)),  # no sequence fills the window
    ],
)
def test_layers_are_divided_by_what_they_need(
    windows: list[int | None], num_layers: int, expected: tuple[int | None, ...]
) -> None:
    groups = LayerGroups.divide(windows, max_length=50)
    assert (groups.num_layers, groups.windows) == (num_layers, expected)


@given(st.lists(st.sampled_from([None, 3, 7, 60]), min_size=1, max_size=80))
def test_every_layer_has_a_place_of_its_own_in_a_group_that_holds_what_it_sees(windows: list[int | None]) -> None:
    groups = LayerGroups.divide(windows, max_length=50)
    assert len(set(groups.places)) == len(groups.places) == len(windows)
    assert list(groups.windows) == sorted(groups.windows, key=lambda one: one is not None)
    assert len(windows) <= groups.num_layers * len(groups.windows) <= len(windows) * 9 / 8
    for window, (group, number) in zip(windows, groups.places, strict=True):
        held = groups.windows[group]
        assert number < groups.num_layers
        assert held is None or (window is not None and window <= held)


def test_one_whole_group_keeps_the_order_of_layers() -> None:
    assert LayerGroups.divide([None] * 3, max_length=9) == LayerGroups.whole(3)
    assert LayerGroups.whole(3).places == ((0, 0), (0, 1), (0, 2))
