"""The arithmetic of `pagewood bench`, against numpy and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewood.server.bench.arrivals import irregular, steady
from pagewood.server.bench.records import Objective, Record, Spread, parse_objective, parse_seconds, summarise


def record(*chunks_s: float, sent_s: float = 0.0, error: str | None = None, num_output: int = 0) -> Record:
    ended_s = max(chunks_s, default=sent_s) + 0.5
    return Record(
        planned_s=sent_s,
        sent_s=sent_s,
        chunks_s=list(chunks_s),
        ended_s=ended_s,
        num_prompt=10,
        num_output=num_output or len(chunks_s),
        error=error,
    )


def test_times_of_a_request() -> None:
    one = record(3.0, 3.5, 5.0, sent_s=1.0, num_output=5)
    assert (one.ttft_s, one.e2e_s, one.itl_s, one.tpot_s) == (2.0, 4.0, [0.5, 1.5], 0.5)
    assert record(1.0).tpot_s is None


def test_summary() -> None:
    records = [
        record(1.0, 2.0, 3.0),
        record(2.0, 2.5, sent_s=1.0),
        record(sent_s=2.0, error="429"),
        record(3.0, sent_s=2.5, error="cut off"),
        record(sent_s=3.0),
    ]
    found = summarise(records, Objective(ttft_s=1.0, itl_s=0.7))
    assert (found.num_complete, found.errors) == (2, {"429": 1, "cut off": 1, "empty answer": 1})
    assert found.duration_s == 3.5
    assert (found.requests_per_s, found.output_tokens_per_s) == (2 / 3.5, 5 / 3.5)
    assert found.good_requests_per_s == 1 / 3.5
    assert found.most_at_once == 3
    assert found.itl_ms is not None
    assert found.itl_ms.p50 == 1000
    assert found.e2e_ms is not None
    assert found.e2e_ms.max == 3000


@given(st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_percentiles_are_those_of_numpy(values: list[float]) -> None:
    spread = Spread.of(values)
    assert spread is not None
    found = [spread.p50, spread.p90, spread.p95, spread.p99, spread.max]
    assert found == pytest.approx(np.percentile(values, [50, 90, 95, 99, 100]).tolist(), rel=1e-9, abs=1e-6)


def test_objectives() -> None:
    assert parse_objective("ttft=200ms, e2e=1.5s") == Objective(ttft_s=0.2, e2e_s=1.5)
    for wrong in ("", "ttft", "ttft=0", "speed=1", "ttft=1,ttft=2", "tpot=-1ms", "itl=nan"):
        with pytest.raises(ValueError, match=r"SLO|time"):
            parse_objective(wrong)
    assert (parse_seconds("2"), parse_seconds("60s"), parse_seconds("5ms")) == (2.0, 60.0, 0.005)


def test_arrivals() -> None:
    assert next(steady(4.0)) == 0.25
    for burstiness in (0.2, 1.0, 5.0):
        gaps = irregular(10.0, burstiness=burstiness, seed=1)
        found = np.array([next(gaps) for _ in range(40_000)])
        assert found.mean() == pytest.approx(0.1, rel=0.05)
        assert found.std() / found.mean() == pytest.approx(burstiness**-0.5, rel=0.05)
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="rate must be positive"):
            steady(wrong)
        with pytest.raises(ValueError, match="burstiness must be positive"):
            irregular(1.0, burstiness=wrong, seed=0)
