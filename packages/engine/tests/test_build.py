import pytest

from pagewood.engine.api import EngineConfig
from pagewood.engine.build import build_engine
from pagewood.engine.links import MemoryInbox, MemoryOutbox


def build(**options: object) -> tuple[int, int]:
    """Build an engine with the embedded model; return (pages, longest request)."""
    config = EngineConfig(**options)  # pyright: ignore[reportArgumentType]
    engine = build_engine(config, inbox=MemoryInbox(), outbox=MemoryOutbox())
    engine.close()
    return engine.info.num_pages, engine.info.max_length


def test_memory_is_as_configured_and_bounds_the_longest_request() -> None:
    assert build(max_total_tokens=1000, page_size=16) == (62, 992)
    assert build(max_total_tokens=1000, page_size=16, max_length=100) == (62, 100)


def test_memory_is_at_most_what_all_rows_can_use() -> None:
    num_pages, max_length = build(max_running=2, page_size=16)
    assert num_pages == 2 * max_length // 16


def test_a_length_that_does_not_fit_is_an_error_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"max_length must be at most 96 .* got 200"):
        build(max_total_tokens=100, max_length=200)


def test_more_memory_than_there_is_is_an_error_and_not_the_end_of_the_process() -> None:
    with pytest.raises(ValueError, match=r"max_total_tokens must be at most \d+, .* GB of memory, got 1000000000000"):
        build(max_total_tokens=10**12)


def test_progress_counts_up_to_its_total() -> None:
    seen: list[tuple[str, int, int]] = []
    engine = build_engine(
        EngineConfig(max_total_tokens=256),
        inbox=MemoryInbox(),
        outbox=MemoryOutbox(),
        progress=lambda what, done, total: seen.append((what, done, total)),
    )
    engine.close()
    assert seen
    assert all(0 <= done <= total for _, done, total in seen)
    assert seen[-1][1] == seen[-1][2]


@pytest.mark.parametrize("name", ["edf", "wrr", "tag", "first"])
def test_a_policy_that_reads_what_requests_lack_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"schedule_policy must be one of fcfs, .*, fair, got '{name}'"):
        build(max_total_tokens=256, schedule_policy=name)
