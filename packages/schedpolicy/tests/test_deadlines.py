import pytest

from pagewood.schedpolicy import Feasibility, Load, StepModel
from pagewood.schedpolicy.testing import FakeRequest

FEASIBILITY = Feasibility(
    model=StepModel(base_s=0.01, prefill_s=0.0001, decode_s=0.001, kv_s=0.00001), chunk_tokens=100
)


def request(deadline_s: float) -> FakeRequest:
    return FakeRequest(arrival=0, num_tokens=250, num_matched=50, max_new_tokens=11, deadline_s=deadline_s)


def test_a_request_ends_after_its_chunks_and_a_step_for_each_other_token():
    # Two chunks of 100 take 20 ms each; then ten steps of 10 + 1 + 2.5 ms.
    assert FEASIBILITY.expected_end_s(request(1.0), 5.0, Load()) == pytest.approx(5.0 + 0.04 + 0.135)


def test_a_load_delays_a_request():
    load = Load(num_prompt_tokens_ahead=130, num_decode=10, num_kv=1000)
    # 330 tokens: three chunks of 40 ms and one of 33; then ten steps of 10 + 11 + 12.5 ms.
    assert FEASIBILITY.expected_end_s(request(1.0), 5.0, load) == pytest.approx(5.0 + 0.12 + 0.033 + 0.335)


def test_its_prompt_takes_longer_behind_a_cached_prefix_if_pairs_take_time():
    model = StepModel(base_s=0.01, prefill_s=0.0001, decode_s=0.001, kv_s=0.00001, pair_s=1e-6)
    with_pairs = Feasibility(model=model, chunk_tokens=100)
    pairs = sum(range(51, 251))  # positions 50 to 249
    assert with_pairs.expected_end_s(request(1.0), 5.0, Load()) == pytest.approx(5.0 + 0.04 + 0.135 + 1e-6 * pairs)


def test_generated_tokens_take_no_more_time():
    again = FakeRequest(arrival=0, num_tokens=100, num_generated=10, max_new_tokens=11)
    assert FEASIBILITY.expected_end_s(again, 0.0, Load()) == pytest.approx(0.02)
    cached = FakeRequest(arrival=0, num_tokens=100, num_matched=100, max_new_tokens=1)
    assert FEASIBILITY.expected_end_s(cached, 0.0, Load()) == pytest.approx(0.0101)


def test_a_part_of_the_output_can_be_expected():
    half = Feasibility(model=FEASIBILITY.model, chunk_tokens=100, output_ratio=0.5)
    assert half.expected_end_s(request(1.0), 0.0, Load()) == pytest.approx(0.04 + (round(5.5) - 1) * 0.0135)
    none = Feasibility(model=FEASIBILITY.model, chunk_tokens=100, output_ratio=0.0)
    assert none.expected_end_s(request(1.0), 0.0, Load()) == pytest.approx(0.04)


def test_a_refusal_names_both_times():
    assert FEASIBILITY.check(request(5.18), 5.0, Load()) is None
    late = FEASIBILITY.check(request(5.17), 5.0, Load())
    assert late is not None
    assert late.reason == "deadline_s is 5.170, but the request is expected to end at 5.175"
    end_s = FEASIBILITY.expected_end_s(request(0.0), 5.0, Load())
    assert FEASIBILITY.check(request(end_s), 5.0, Load()) is None  # just in time
    assert FEASIBILITY.check(request(float("inf")), 5.0, Load(num_decode=10**6)) is None


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="chunk_tokens must be >= 1, got 0"):
        Feasibility(model=FEASIBILITY.model, chunk_tokens=0)
    with pytest.raises(ValueError, match=r"output_ratio must be in \[0, 1\], got 1.5"):
        Feasibility(model=FEASIBILITY.model, chunk_tokens=1, output_ratio=1.5)
