"""The tokenizer with the fewest outstanding bytes gets the next request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagewood.server.requests.loads import TokenizerLoads


def test_a_huge_prompt_sends_the_others_elsewhere() -> None:
    loads = TokenizerLoads(2)
    assert loads.add("huge", 10_000_000) == 0
    assert [loads.add(f"{n}", 100) for n in range(5)] == [1] * 5
    loads.remove("huge")
    assert loads.add("next", 100) == 0


KINDS = st.sampled_from(["add", "remove", "clear", "lost", "back"])
EVENTS = st.lists(st.tuples(KINDS, st.integers(0, 9), st.integers(1, 99)))


@given(num_tokenizers=st.integers(1, 4), events=EVENTS)
def test_against_a_sum_over_all_requests(num_tokenizers: int, events: list[tuple[str, int, int]]) -> None:
    loads = TokenizerLoads(num_tokenizers)
    counted: dict[str, tuple[int, int]] = {}
    away: set[int] = set()
    for number, (event, choice, num_bytes) in enumerate(events):
        if event == "add":
            sums = [sum(size for index, size in counted.values() if index == i) for i in range(num_tokenizers)]
            chosen = loads.add(f"{number}", num_bytes)
            assert chosen not in away or len(away) == num_tokenizers
            assert sums[chosen] == min(sums[i] for i in range(num_tokenizers) if i not in away or chosen in away)
            counted[f"{number}"] = (chosen, num_bytes)
        elif event == "remove":
            loads.remove(f"{choice}")
            counted.pop(f"{choice}", None)
        elif event == "back":
            loads.back(choice % num_tokenizers)
            away.discard(choice % num_tokenizers)
        else:
            (loads.clear if event == "clear" else loads.lost)(choice % num_tokenizers)
            away |= {choice % num_tokenizers} if event == "lost" else set()
            counted = {name: one for name, one in counted.items() if one[0] != choice % num_tokenizers}
        assert loads.away == away
