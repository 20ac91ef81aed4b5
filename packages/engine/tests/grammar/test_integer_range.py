"""Ranges of integers as expressions, compared with counting."""

from __future__ import annotations

import random
import re

import pytest

from pagewood.engine.grammar.integer_range import range_expression

BOUNDS = (*range(-21, 22), -1001, -1000, -999, -101, -100, -99, 99, 100, 101, 110, 999, 1000, 1001)


def test_all_small_ranges() -> None:
    numbers = range(-1020, 1021)
    for low in (None, *BOUNDS):
        for high in (None, *(bound for bound in BOUNDS if low is None or bound >= low)):
            matches = re.compile(range_expression(low, high)).fullmatch
            found = [number for number in numbers if matches(str(number))]
            assert found == [n for n in numbers if (low is None or n >= low) and (high is None or n <= high)], (
                low,
                high,
            )


def test_borders_of_large_ranges() -> None:
    draws = random.Random(5)
    edges = [0, 2**53, 2**63, 2**64, *(10**exponent for exponent in range(1, 39))]
    for _ in range(300):
        low, high = sorted(draws.choice((1, -1)) * draws.choice(edges) + draws.randint(-3, 3) for _ in range(2))
        matches = re.compile(range_expression(low, high)).fullmatch
        near = {edge + step for edge in (low, high, draws.randint(low, high)) for step in range(-2, 3)}
        far = {draws.choice((1, -1)) * draws.randrange(10 ** draws.randint(1, 40)) for _ in range(20)}
        wrong = [number for number in near | far if bool(matches(str(number))) != (low <= number <= high)]
        assert not wrong, (low, high, wrong)


@pytest.mark.parametrize("text", ["", "-", "-0", "00", "01", "-01", "+1", "1.0", "1e3", " 1"])
def test_texts_that_are_no_integers_of_json(text: str) -> None:
    for low, high in ((None, None), (-5, 5), (-(2**63), 2**63 - 1), (0, None)):
        assert not re.fullmatch(range_expression(low, high), text)


def test_an_empty_range_is_refused() -> None:
    with pytest.raises(ValueError, match="low must be at most high, got 3 and 2"):
        range_expression(3, 2)
