import math
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewood.schedpolicy import Admission, AdmissionLimits, Outcome, fits_until_all_end
from pagewood.schedpolicy.testing import FakeRequest


@dataclass
class Memory:
    num_available: int


def request(
    num_uncached: int, max_new: int = 10, *, num_matched: int = 0, arrival: int = 0, **fields: Any
) -> FakeRequest:
    return FakeRequest(
        arrival=arrival,
        num_tokens=num_matched + num_uncached,
        num_matched=num_matched,
        max_new_tokens=max_new,
        **fields,
    )


def admission(num_available: int, *, running: list[FakeRequest] | None = None, **options: Any) -> Admission:
    names = ("new_token_ratio", "num_decodes", "num_partial")
    own: dict[str, Any] = {"new_token_ratio": 0.5, **{name: options.pop(name) for name in names if name in options}}
    return Admission(
        AdmissionLimits(**{"page_size": 16, **options}),
        room=Memory(num_available),
        running=running or [],
        **own,
    )


# Uncached + output + one page must be less than what is left: 100 + 10 + 16 = 126.
@pytest.mark.parametrize(("num_available", "fits"), [(126, False), (127, True)])
def test_a_request_needs_its_prompt_its_output_and_a_page(num_available: int, fits: bool):
    chunk = admission(num_available).admit(request(100))
    assert chunk.verdict.fits == fits
    assert chunk.num_tokens == (100 if fits else 0)
    if not fits:
        assert chunk.verdict.outcome is Outcome.NO_TOKEN
        assert chunk.verdict.reason == "remaining_total: 126 wanted, 126 left"


def test_cached_tokens_need_no_memory():
    assert admission(127).admit(request(100, num_matched=5000)).num_tokens == 100


def test_a_long_allowance_is_clipped():
    assert admission(100 + 4096 + 16 + 1).admit(request(100, 1_000_000)).verdict.fits
    assert not admission(100 + 4096 + 16).admit(request(100, 1_000_000)).verdict.fits
    assert admission(100 + 7 + 16 + 1, max_output_estimate=7).admit(request(100, 1_000_000)).verdict.fits


def test_only_the_rest_of_an_allowance_counts():
    assert admission(127).admit(request(100, 30, num_generated=20)).verdict.fits
    assert admission(117).admit(request(100, 30, num_generated=50)).verdict.fits


def test_running_requests_are_expected_to_generate_a_part_of_their_allowance():
    running = [request(0, 100, num_generated=40), request(0, 10_000)]
    step = admission(5000, running=running, num_decodes=2)
    assert step.remaining_total == 5000 - 2 - 0.5 * (60 + 4096)
    assert step.remaining_current == 5000 - 2
    assert step.remaining_input == 16_384 - 2


def test_a_request_that_ignores_eos_is_expected_to_generate_all():
    running = [request(0, 100, num_generated=40, ignores_eos=True), request(0, 100)]
    assert admission(5000, running=running).remaining_total == 5000 - 60 - 0.5 * 100


def test_an_admission_reserves_whole_pages_and_one_more():
    step = admission(1000, max_chunk_tokens=500)
    assert step.admit(request(20, 30)).num_tokens == 20
    assert step.remaining_total == 1000 - (32 + 16) - 30
    assert step.remaining_current == 1000 - (32 + 16)
    assert step.remaining_input == 16_384 - 32
    assert step.remaining_chunk == 500 - 32


def test_without_chunks_only_the_first_request_may_be_too_long():
    step = admission(10_000, max_input_tokens=100)
    assert step.admit(request(90)).verdict.fits
    refused = step.admit(request(1))
    assert refused.verdict.outcome is Outcome.OTHER
    assert refused.verdict.reason == "remaining_input: 16 wanted, 4 left"
    assert admission(10_000, max_input_tokens=100).admit(request(1000)).num_tokens == 1000


def test_without_chunks_a_prompt_must_be_shorter_than_the_rest():
    step = admission(10_000, max_input_tokens=64)
    step.admit(request(16))
    assert not step.admit(request(48)).verdict.fits
    assert step.admit(request(32)).verdict.fits


def test_a_prompt_is_cut_at_the_end_of_a_page_and_reserves_no_output():
    step = admission(10_000, max_chunk_tokens=100)
    chunk = step.admit(request(500))
    assert (chunk.num_tokens, chunk.is_cut) == (96, True)
    assert step.remaining_total == 10_000 - 96 - 16
    assert step.remaining_chunk == 4
    refused = step.admit(request(20))
    assert refused.verdict.reason == "remaining_chunk: 32 wanted, 4 left"
    assert refused.verdict.outcome is Outcome.OTHER


def test_a_cut_counts_from_the_cached_tokens():
    # 5 are cached, so 11 tokens of the first page are left: 16 * 6 - 5 = 91 of the 100.
    assert admission(10_000, max_chunk_tokens=100).admit(request(500, num_matched=5)).num_tokens == 91
    # If the cut would be after the end of the prompt, the prompt is not cut.
    chunk = admission(10_000, max_chunk_tokens=107).admit(request(106, num_matched=5))
    assert (chunk.num_tokens, chunk.is_cut) == (106, False)
    chunk = admission(10_000, max_chunk_tokens=107).admit(request(107, num_matched=5))
    assert (chunk.num_tokens, chunk.is_cut) == (107, False)
    # The missing whole pages fit, so it is not cut, though it reaches into one more page.
    chunk = admission(10_000, max_chunk_tokens=16).admit(request(16, num_matched=5))
    assert (chunk.num_tokens, chunk.is_cut) == (16, False)


def test_a_cut_may_be_as_short_as_a_token():
    chunk = admission(10_000, page_size=1, max_chunk_tokens=1).admit(request(5))
    assert (chunk.num_tokens, chunk.is_cut) == (1, True)


def test_no_output_need_be_reserved():
    assert admission(1 + 16 + 1, max_output_estimate=0).admit(request(1, 1000)).verdict.fits


def test_one_prompt_in_progress_is_the_default():
    step = admission(10_000, max_chunk_tokens=400, max_request_tokens=160)
    assert step.admit(request(500)).is_cut
    assert step.admit(request(500)).verdict.short_of == "max_partial"


def test_one_prompt_in_progress_as_in_sglang_or_several():
    for max_partial, fits in ((1, False), (2, True)):
        step = admission(10_000, max_chunk_tokens=400, max_request_tokens=160, max_partial=max_partial)
        assert step.admit(request(500)).num_tokens == 160
        chunk = step.admit(request(500))
        assert chunk.verdict.fits == fits
        assert chunk.verdict.reason == ("" if fits else "max_partial: 1 wanted, 0 left")
        assert step.admit(request(50)).num_tokens == 50  # a prompt that need not be cut still fits


def test_a_prompt_in_progress_continues_and_ends():
    step = admission(10_000, max_chunk_tokens=96, num_partial=1)
    chunk = step.continue_prompt(request(500), num_computed=96)
    assert (chunk.num_tokens, chunk.is_cut) == (96, True)
    assert step.remaining_total == 10_000 - 96 - 16
    step = admission(10_000, max_chunk_tokens=96, num_partial=1)
    chunk = step.continue_prompt(request(500), num_computed=480)
    assert (chunk.num_tokens, chunk.is_cut) == (20, False)
    assert step.remaining_total == 10_000 - 32 - 16 - 10
    assert step.admit(request(500)).num_tokens == 64  # its place among the prompts in progress is free


def test_a_prompt_in_progress_is_limited_by_unreserved_memory():
    running = [request(0, 1000)]
    step = admission(570, running=running, max_chunk_tokens=512, num_partial=1)
    chunk = step.continue_prompt(request(500), num_computed=0)
    assert chunk.num_tokens == 64  # of the 70


def test_the_first_prompt_in_progress_advances_if_all_memory_is_reserved():
    running = [request(0, 2000)]
    step = admission(100, running=running, max_chunk_tokens=64, num_partial=2)
    assert step.continue_prompt(request(500), num_computed=0).num_tokens == 64
    second = step.continue_prompt(request(500), num_computed=0)
    assert second.verdict.outcome is Outcome.NO_TOKEN
    assert second.verdict.short_of == "remaining_total"


def test_the_first_prompt_in_progress_advances_if_exactly_all_memory_is_reserved():
    running = [request(0, 200)]
    step = admission(100, running=running, max_chunk_tokens=64, num_partial=1)
    assert step.remaining_total == 0
    assert step.continue_prompt(request(500), num_computed=0).num_tokens == 64


def test_one_unreserved_token_is_all_that_is_left():
    step = admission(101, page_size=1, running=[request(0, 200)], max_chunk_tokens=64, num_partial=1)
    assert step.remaining_total == 1
    assert step.continue_prompt(request(500), num_computed=0).num_tokens == 1


def test_no_prompt_advances_without_memory():
    step = admission(0, max_chunk_tokens=64, num_partial=1)
    assert step.continue_prompt(request(500), num_computed=0).verdict.outcome is Outcome.NO_TOKEN
    step = admission(15, max_chunk_tokens=64, num_partial=1)  # less than a page
    verdict = step.continue_prompt(request(500), num_computed=0).verdict
    assert (verdict.outcome, verdict.reason) == (Outcome.NO_TOKEN, "remaining_total: 512 wanted, 15 left")


@pytest.mark.parametrize(
    ("options", "outcome", "reason"),
    [
        ({"num_available": 50, "running": [request(0, 100)]}, Outcome.NO_TOKEN, "remaining_total: 1 wanted, 0 left"),
        ({"num_available": 3, "num_decodes": 3}, Outcome.NO_TOKEN, "remaining_total: 1 wanted, 0 left"),
        (
            {"num_available": 100, "max_input_tokens": 5, "num_decodes": 5},
            Outcome.OTHER,
            "remaining_input: 1 wanted, 0 left",
        ),
        (
            {"num_available": 100, "max_chunk_tokens": 16, "num_decodes": 16},
            Outcome.OTHER,
            "remaining_chunk: 1 wanted, 0 left",
        ),
        ({"num_available": 51, "running": [request(0, 100)]}, Outcome.CONTINUE, ""),
    ],
)
def test_the_verdict_names_the_number_that_is_short(options: dict[str, Any], outcome: Outcome, reason: str):
    verdict = admission(**options).verdict
    assert (verdict.outcome, verdict.reason) == (outcome, reason)


def test_one_token_of_each_is_enough_to_continue():
    assert admission(1).verdict.fits
    assert admission(2, num_decodes=1, max_input_tokens=2).verdict.fits
    assert admission(100, num_decodes=15, max_chunk_tokens=16).verdict.fits


def test_memory_is_read_at_every_check():
    memory = Memory(1000)
    step = Admission(AdmissionLimits(page_size=16), room=memory, running=[], new_token_ratio=0.5)
    assert step.verdict.fits
    memory.num_available = 0  # a prefix was locked
    assert not step.verdict.fits
    assert not step.admit(request(1)).verdict.fits


@given(
    seed=st.integers(0, 10_000),
    page_size=st.sampled_from([1, 4, 16]),
    num_available=st.integers(0, 2000),
    chunk=st.none() | st.integers(16, 300),
    max_partial=st.integers(1, 3),
    ratio=st.sampled_from([0.0, 0.1, 0.7, 1.0]),
)
def test_nothing_is_ever_overcommitted(
    seed: int, page_size: int, num_available: int, chunk: int | None, max_partial: int, ratio: float
):
    rng = Random(seed)
    limits = AdmissionLimits(
        page_size=page_size,
        max_input_tokens=rng.randint(1, 400),
        max_chunk_tokens=chunk,
        max_request_tokens=rng.choice((None, 16, 64)),
        max_partial=max_partial,
    )
    running = [request(0, rng.randint(1, 300), num_generated=rng.randint(0, 50)) for _ in range(rng.randint(0, 4))]
    num_partial = rng.randint(0, max_partial) if chunk else 0
    step = Admission(
        limits,
        room=Memory(num_available),
        running=running,
        new_token_ratio=ratio,
        num_decodes=len(running),
        num_partial=num_partial,
    )
    num_pages = num_tokens = num_cut = num_whole = 0
    for number in range(num_partial + 12):
        is_partial = number < num_partial
        num_before = page_size * rng.randint(0, 5)
        left = request(rng.randint(1, 400), rng.randint(0, 300), num_matched=num_before)
        got = step.continue_prompt(left, num_computed=num_before) if is_partial else step.admit(left)
        num_left = left.num_tokens - num_before
        assert 0 <= got.num_tokens <= num_left
        assert got.verdict.fits == (got.num_tokens > 0)
        assert got.is_cut == (0 < got.num_tokens < num_left)
        if got.is_cut:
            assert (num_before + got.num_tokens) % page_size == 0
        num_pages += -(-got.num_tokens // page_size)
        num_tokens += got.num_tokens
        num_cut += got.is_cut or (is_partial and not got.num_tokens)
        num_whole += bool(got.num_tokens)
    # Memory holds the computed tokens and one token for every decode.
    assert num_pages * page_size + len(running) <= num_available or not num_pages
    if chunk is not None:
        assert num_tokens <= max(0, chunk - len(running))
    if num_whole > 1 or chunk is not None:
        assert num_tokens <= limits.max_input_tokens or not num_tokens
    assert num_cut <= max_partial


def test_a_request_that_ignores_eos_needs_all_its_remaining_output():
    running = [request(10, 8, num_generated=3)]
    assert fits_until_all_end(running, num_available=5)
    assert not fits_until_all_end(running, num_available=4)
    assert fits_until_all_end([request(10, 0)], num_available=0)
    # The first ends after 2 steps and frees 12: until then 4 are needed, and then 3 more for the other.
    running = [request(10, 2), request(10, 5)]
    assert fits_until_all_end(running, num_available=4)
    assert not fits_until_all_end(running, num_available=3)


@given(seed=st.integers(0, 10_000), num_available=st.integers(0, 120))
def test_requests_that_ignore_eos_fit_exactly_if_a_simulation_shows_it(seed: int, num_available: int):
    rng = Random(seed)
    running = [request(rng.randint(1, 20), rng.randint(0, 20)) for _ in range(rng.randint(0, 5))]
    free = num_available
    left = [[r.max_new_tokens, r.num_tokens] for r in running]
    survived = True
    while left and survived:
        for entry in [entry for entry in left if entry[0] == 0]:
            left.remove(entry)
            free += entry[1]
        free -= len(left)
        survived = free >= 0
        for entry in left:
            entry[0] -= 1
            entry[1] += 1
    assert fits_until_all_end(running, num_available=num_available) == survived


def test_arguments_are_checked():
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"page_size": 0}, "page_size must be >= 1, got 0"),
        ({"max_input_tokens": 0}, "max_input_tokens must be >= 1, got 0"),
        ({"max_partial": 0}, "max_partial must be >= 1, got 0"),
        ({"max_chunk_tokens": 15}, r"max_chunk_tokens must be >= page_size \(16\), got 15"),
        ({"max_request_tokens": 15}, r"max_request_tokens must be >= page_size \(16\), got 15"),
        ({"max_output_estimate": -1}, "max_output_estimate must be >= 0, got -1"),
        ({"new_token_ratio": 1.1}, r"new_token_ratio must be in \[0, 1\], got 1.1"),
        ({"new_token_ratio": math.nan}, r"new_token_ratio must be in \[0, 1\], got nan"),
        ({"num_decodes": -1}, "num_decodes must be >= 0, got -1"),
        ({"num_partial": -1}, "num_partial must be >= 0, got -1"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            admission(100, **options)
