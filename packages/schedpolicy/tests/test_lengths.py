from dataclasses import dataclass

from pagewood.schedpolicy.memory.lengths import num_at_parts, part_of


@dataclass(frozen=True, slots=True)
class Runner:
    num_generated: int
    max_new_tokens: int
    num_tokens: int = 400
    arrival: int = 0
    priority: int = 0


RUNNING = [Runner(done, 300) for done in (0, 2, 3, 5, 299, 300, 301)]


def test_progress_is_counted_in_hundredths_rounded_down():
    assert [part_of(request) for request in RUNNING] == [0, 0, 1, 1, 99, 100, 100]
    assert part_of(Runner(0, 0)) == 100


def test_requests_are_counted_by_their_part():
    assert num_at_parts(RUNNING) == [2, 2, *[0] * 97, 1, 2]
    assert num_at_parts([]) == [0] * 101
