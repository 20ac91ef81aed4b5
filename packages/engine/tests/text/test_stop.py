"""Stop strings, compared with an oracle that searches the whole text."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewood.engine.text import StopStrings
from scale import scaled


def oracle(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Try every end in order, and at each end the longest stop string first."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def could_begin_a_stop(text: str, stops: list[str]) -> int:
    """Return the length of the longest suffix that is a beginning of a stop string."""
    return max((n for stop in stops for n in range(len(stop)) if n <= len(text) and text.endswith(stop[:n])), default=0)


few_letters = st.text(alphabet="ab", max_size=6)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4)


@given(chunks=st.lists(few_letters, max_size=8), stops=stop_lists)
@settings(max_examples=scaled(75))
def test_against_oracle(chunks: list[str], stops: list[str]) -> None:
    watch = StopStrings(stops)
    shown = ""
    seen = ""
    for chunk in chunks:
        seen += chunk
        shown += watch.push(chunk)
        before, found = oracle(seen, stops)
        assert watch.matched == found
        if found is None:  # exactly the possible beginning of a stop string is held back
            assert shown == seen[: len(seen) - could_begin_a_stop(seen, stops)]
        else:
            assert shown == before
    shown += watch.flush()
    assert (shown, watch.matched) == oracle(seen, stops)


def test_a_match_ends_the_text() -> None:
    watch = StopStrings(["\n\n"])
    assert watch.push("one\n") == "one"
    assert watch.push("\ntwo") == ""
    assert watch.matched == "\n\n"
    assert watch.push("three") == ""
    assert watch.flush() == ""


def test_no_stop_strings_hold_nothing() -> None:
    watch = StopStrings([])
    assert watch.push("text") == "text"
    assert watch.flush() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="stop must hold no empty string"):
        StopStrings(["a", ""])


def test_searches_for_the_same_strings_share_their_tables() -> None:
    stop = "ab" * 50_000
    tracemalloc.start()
    try:
        searches = [StopStrings([stop]) for _ in range(8)]
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < 8 * len(stop)  # a table of integers took 36 bytes a character, eight times
    assert searches[7].push("x" + stop) == "x"
    assert searches[0].matched is None
