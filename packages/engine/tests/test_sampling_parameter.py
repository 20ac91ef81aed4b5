"""Every number among the sampling parameters is declared once, and the table has it as it is declared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewood.engine.api import SAMPLING_PARAMETERS, SamplingParams
from pagewood.engine.core.messages.sampling_table import NUM_SAMPLING_COLUMNS, SamplingArrays, SamplingColumn

DRAWN = [name for name, one in SAMPLING_PARAMETERS.items() if one.off is not None]
SEEDS = st.integers(-(2**63), 2**63 - 1)


def number(name: str) -> st.SearchStrategy[Any]:
    """Return values of a parameter that a float32 holds without rounding, what is off among them."""
    parameter, default = SAMPLING_PARAMETERS[name], getattr(SamplingParams(), name)
    if isinstance(default, int):
        return st.integers(int(parameter.low), int(parameter.high))
    return st.just(default) | st.floats(parameter.low, parameter.high, width=32, exclude_min=parameter.excludes_low)


PARAMS = st.fixed_dictionaries({name: number(name) for name in DRAWN}).map(lambda values: SamplingParams(**values))
ROWS = st.lists(st.tuples(PARAMS, SEEDS), max_size=5)


def column(arrays: SamplingArrays, name: str) -> list[float]:
    words = arrays.words[:, SamplingColumn[name.upper()]]
    return (words if isinstance(getattr(SamplingParams(), name), int) else words.view(np.float32)).tolist()


def test_the_columns_are_the_parameters_that_drawing_reads() -> None:
    names = {one.name.lower() for one in SamplingColumn if one > SamplingColumn.SEED_REST}
    assert names == set(DRAWN)
    assert list(SamplingColumn) == list(range(NUM_SAMPLING_COLUMNS))


def test_a_default_changes_nothing() -> None:
    for name in DRAWN:
        if name != "temperature":
            assert getattr(SamplingParams(), name) == SAMPLING_PARAMETERS[name].off
    assert SamplingArrays.of([SamplingParams()], [1]).used() == {SamplingColumn.TEMPERATURE}


@pytest.mark.parametrize("name", SAMPLING_PARAMETERS)
def test_a_number_out_of_its_range_is_refused_by_name(name: str) -> None:
    one = SAMPLING_PARAMETERS[name]
    assert getattr(replace(SamplingParams(), **{name: one.high}), name) == one.high
    wrong = [one.low - 1, one.high + 1, float("nan"), *([one.low] if one.excludes_low else [])]
    for value in wrong:
        with pytest.raises(ValueError, match=rf"^{name} must be in [(\[]{one.low}, {one.high}\], got {value}$"):
            replace(SamplingParams(), **{name: value})


@given(ROWS)
def test_the_table_holds_what_it_is_made_of(rows: list[tuple[SamplingParams, int]]) -> None:
    params, seeds = [one for one, _ in rows], [seed for _, seed in rows]
    arrays = SamplingArrays.of(params, seeds)
    assert arrays.words.shape == (len(rows), NUM_SAMPLING_COLUMNS)
    assert arrays.seeds.tolist() == seeds
    for name in DRAWN:
        assert column(arrays, name) == [getattr(one, name) for one in params]
    assert arrays.temperatures.tolist() == [one.temperature for one in params]
    flat = arrays.flat()
    assert flat[: 2 * len(rows)].view(np.int64).tolist() == seeds
    columns = flat[2 * len(rows) :].reshape(NUM_SAMPLING_COLUMNS - 2, len(rows))
    assert columns.tolist() == arrays.words[:, 2:].T.tolist()
    used = {SamplingColumn[name.upper()] for name in DRAWN for one in params if is_on(one, name)}
    assert arrays.used() == used


def is_on(params: SamplingParams, name: str) -> bool:
    return getattr(params, name) != SAMPLING_PARAMETERS[name].off


@given(ROWS, st.data())
def test_rows_are_taken_and_put(rows: list[tuple[SamplingParams, int]], data: st.DataObject) -> None:
    table = SamplingArrays.of([SamplingParams(temperature=0.0)] * 9, range(9))
    places = data.draw(st.lists(st.integers(0, 8), min_size=len(rows), max_size=len(rows), unique=True))
    params, seeds = [one for one, _ in rows], [seed for _, seed in rows]
    table.put(places, params, seeds)
    taken = table.take(np.array(places, np.intp))
    assert taken.words.tolist() == SamplingArrays.of(params, seeds).words.tolist()
    others = [place for place in range(9) if place not in places]
    assert table.seeds[others].tolist() == others
    assert not np.shares_memory(taken.words, table.words)
    moved = taken.with_seeds(~taken.seeds)
    assert moved.seeds.tolist() == [~seed for seed in seeds]
    assert moved.words[:, 2:].tolist() == taken.words[:, 2:].tolist()
    assert taken.seeds.tolist() == seeds
