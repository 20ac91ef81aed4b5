from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewood.schedpolicy import DynamicChunk, StepModel, StepSample
from pagewood.schedpolicy.steps.latency import pairs_of

MODEL = StepModel(base_s=0.005, prefill_s=50e-6, decode_s=20e-6, kv_s=10e-9)


def samples(model: StepModel, *, noise: float = 0.0, seed: int = 0) -> list[StepSample]:
    rng = Random(seed)
    found: list[StepSample] = []
    for _ in range(200):
        shape = rng.choice((0, 0, 512, 2048)), rng.randint(0, 200), rng.randint(0, 500_000)
        seconds = model.step_s(num_prefill=shape[0], num_decode=shape[1], num_kv=shape[2])
        found.append(StepSample(*shape, seconds * (1 + noise * rng.uniform(-1, 1))))
    return found


def test_a_step_is_the_sum_of_its_parts():
    assert MODEL.step_s(num_prefill=100, num_decode=10, num_kv=10_000) == pytest.approx(0.005 + 0.005 + 0.0002 + 0.0001)


@given(st.floats(0, 0.2), st.integers(0, 300), st.integers(0, 10**6))
def test_a_chunk_is_the_most_that_ends_in_time(target_s: float, num_decode: int, num_kv: int):
    chunk = MODEL.chunk_tokens(target_s, num_decode=num_decode, num_kv=num_kv)
    assert MODEL.step_s(num_prefill=chunk + 1, num_decode=num_decode, num_kv=num_kv) > target_s - 1e-9
    if chunk:
        assert MODEL.step_s(num_prefill=chunk, num_decode=num_decode, num_kv=num_kv) <= target_s + 1e-9


def test_a_model_is_recovered_from_its_steps():
    fitted = StepModel.fitted(samples(MODEL))
    assert fitted.base_s == pytest.approx(MODEL.base_s)
    assert fitted.prefill_s == pytest.approx(MODEL.prefill_s)
    assert fitted.decode_s == pytest.approx(MODEL.decode_s)
    assert fitted.kv_s == pytest.approx(MODEL.kv_s)


def test_a_model_is_recovered_within_the_noise():
    fitted = StepModel.fitted(samples(MODEL, noise=0.1))
    assert fitted.prefill_s == pytest.approx(MODEL.prefill_s, rel=0.05)


def test_pairs_of_long_prompts_are_told_from_their_tokens():
    model = StepModel(base_s=0.01, prefill_s=1e-4, decode_s=0.0, kv_s=0.0, pair_s=1e-7)
    found: list[StepSample] = []
    for start in (0, 500, 3000):
        for count in (100, 500):
            num_pairs = sum(position + 1 for position in range(start, start + count))
            assert pairs_of(start, count) == num_pairs
            seconds = model.step_s(num_prefill=count, num_decode=0, num_kv=0, num_pairs=num_pairs)
            found.append(StepSample(count, 0, 0, seconds, num_pairs))
    fitted = StepModel.fitted(found)
    assert (fitted.prefill_s, fitted.pair_s) == (pytest.approx(1e-4), pytest.approx(1e-7))


def test_a_relative_fit_follows_short_steps_where_no_model_fits_all():
    shapes = [(0, 1), (0, 8), (500, 0), (4000, 0)]
    found = [StepSample(n, d, 0, (0.01 + n * 1e-3 + d * 1e-3) * (1.3 if n == 4000 else 1.0)) for n, d in shapes]

    def error(model: StepModel) -> float:
        return abs(model.step_s(num_prefill=0, num_decode=1, num_kv=0) / found[0].seconds - 1)

    assert error(StepModel.fitted(found, relative=True)) < 0.01 < error(StepModel.fitted(found))
    with pytest.raises(ValueError, match=r"seconds must be > 0, got 0\.0"):
        StepModel.fitted([StepSample(1, 0, 0, 0.0)], relative=True)


def test_a_constant_column_gets_no_cost():
    found = [StepSample(n, 0, 0, 0.01 + n * 1e-4) for n in (0, 100, 200)]
    fitted = StepModel.fitted(found)
    assert (fitted.base_s, fitted.prefill_s) == (pytest.approx(0.01), pytest.approx(1e-4))
    assert (fitted.decode_s, fitted.kv_s) == (0.0, 0.0)


def test_a_dependent_column_gets_no_cost():
    for seed in range(50):
        rng = Random(seed)
        shapes = [(rng.randint(0, 50), rng.randint(1, 60)) for _ in range(8)]
        found = [StepSample(n, d, 3 * n + 7 * d + 5, 0.01 + n * 1e-4 + d * 3e-4) for n, d in shapes]
        fitted = StepModel.fitted(found)
        for s in found:
            expected_s = fitted.step_s(num_prefill=s.num_prefill, num_decode=s.num_decode, num_kv=s.num_kv)
            assert expected_s == pytest.approx(s.seconds)


def test_no_coefficient_is_negative():
    found = [StepSample(n, d, 0, 0.01 + n * 1e-4 - d * 1e-5) for n in (0, 100, 200) for d in (0, 10, 20)]
    fitted = StepModel.fitted(found)
    assert fitted.decode_s == 0.0
    assert fitted.prefill_s == pytest.approx(1e-4)


def test_steps_that_do_not_determine_the_model_are_refused():
    falling = [StepSample(n, 0, 0, 0.1 - n * 1e-4) for n in (0, 100, 200)]  # a prompt would save time
    for found in (
        [],
        [StepSample(100, 1, 1, 0.1)],
        [StepSample(100, 1, 1, 0.1)] * 5,
        falling,
        [StepSample(0, n, n, 0.1 * n) for n in range(9)],
    ):
        with pytest.raises(ValueError, match=f"samples must have .* got {len(found)} samples"):
            StepModel.fitted(found)


def test_coefficients_are_checked():
    with pytest.raises(ValueError, match="kv_s must be >= 0 and finite, got -1"):
        StepModel(base_s=0.0, prefill_s=1.0, decode_s=0.0, kv_s=-1.0)
    with pytest.raises(ValueError, match="base_s must be >= 0 and finite, got inf"):
        StepModel(base_s=float("inf"), prefill_s=1.0, decode_s=0.0, kv_s=0.0)
    with pytest.raises(ValueError, match="prefill_s must be > 0, got 0"):
        StepModel(base_s=0.0, prefill_s=0.0, decode_s=0.0, kv_s=0.0)


def test_chunks_shrink_with_more_decodes_and_stay_in_their_limits():
    chunk = DynamicChunk(MODEL, target_s=0.05, max_tokens=800, min_tokens=20, page_size=16)
    assert chunk.tokens(num_decode=0, num_kv=0) == 800
    assert chunk.tokens(num_decode=200, num_kv=2_000_000) == 416  # 50 ms - 5 - 4 - 20 = 21 ms: 420 tokens
    assert chunk.tokens(num_decode=200, num_kv=9_000_000) == 32


def test_chunks_follow_the_measured_steps():
    chunk = DynamicChunk(MODEL, target_s=0.05, max_tokens=8000, refit_every=50)
    assert chunk.tokens(num_decode=0, num_kv=0) == 900
    slow = StepModel(base_s=0.005, prefill_s=100e-6, decode_s=20e-6, kv_s=10e-9)
    steps = samples(slow)
    for sample in steps[:49]:
        chunk.observe(sample)
    assert chunk.model == MODEL
    chunk.observe(steps[49])
    assert chunk.model.prefill_s == pytest.approx(slow.prefill_s)
    assert chunk.tokens(num_decode=0, num_kv=0) == pytest.approx(450, abs=1)


def test_steps_that_do_not_determine_the_model_leave_it_unchanged():
    chunk = DynamicChunk(MODEL, target_s=0.05, max_tokens=8000, refit_every=2)
    for _ in range(4):
        chunk.observe(StepSample(0, 10, 10, 0.01))
    assert chunk.model == MODEL


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_s": 0.0}, "target_s must be > 0, got 0.0"),
        ({"page_size": 0}, "page_size must be >= 1, got 0"),
        ({"min_tokens": 0}, "min_tokens must be >= 1, got 0"),
        ({"window": 5, "refit_every": 6}, r"refit_every must be in \[1, window \(5\)\], got 6"),
        ({"refit_every": 0}, "refit_every must be in"),
        ({"max_tokens": 31, "page_size": 16, "min_tokens": 17}, r"max_tokens must be >= min_tokens \(32\) .* got 31"),
    ],
)
def test_limits_of_chunks_are_checked(options: dict[str, float], message: str):
    with pytest.raises(ValueError, match=message):
        DynamicChunk(MODEL, **{"target_s": 0.05, "max_tokens": 800, **options})  # pyright: ignore[reportArgumentType]
