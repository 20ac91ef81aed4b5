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


SIZED = st.lists(st.tuples(st.sampled_from([None, 3, 60]), st.integers(1, 6)), min_size=1, max_size=40)


@given(SIZED, st.sampled_from([1, 50]))
def test_layers_of_several_sizes_share_places_without_overlap(
    layers: list[tuple[int | None, int]], max_length: int
) -> None:
    windows, sizes = [window for window, _ in layers], [size for _, size in layers]
    groups = LayerGroups.divide(windows, max_length=max_length, sizes=sizes)
    taken: set[tuple[int, int, int]] = set()
    for (window, size), (group, number), start in zip(layers, groups.places, groups.starts, strict=True):
        held = groups.windows[group]
        assert number < groups.num_layers
        assert held is None or (window is not None and window <= held)
        assert start + size <= max(sizes)
        own = {(group, number, unit) for unit in range(start, start + size)}
        assert not own & taken
        taken |= own


def test_two_small_layers_fill_the_place_of_a_large_one() -> None:
    windows = [8, 8, 8, 8, None] * 3
    groups = LayerGroups.divide(windows, max_length=50, sizes=[1, 1, 1, 1, 2] * 3)
    assert (groups.num_layers, groups.windows) == (3, (None, 8, 8))
    assert groups.places[:5] == ((1, 0), (1, 0), (1, 1), (1, 1), (0, 0))
    assert groups.starts[:5] == (0, 1, 0, 1, 0)


def test_layers_may_have_the_memory_of_others() -> None:
    groups = LayerGroups.divide([8, None], max_length=50, sizes=[1, 1]).shared([0, 1, 0, 1])
    assert groups.places == ((1, 0), (0, 0), (1, 0), (0, 0))
    assert groups.starts == (0, 0, 0, 0)
