"""The GPU benchmark, run with its stand-ins, and the arithmetic of its table."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("results")
    command = [sys.executable, BENCHMARKS / "gpu.py", "--stand-in", "--record", folder]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.json")
    assert path.with_suffix(".md").read_text() in done.stdout
    return json.loads(path.read_text())


@pytest.mark.slow
def test_every_row_of_the_stand_ins_is_measured(record: dict[str, Any]) -> None:
    names = [row["name"] for row in record["rows"]]
    assert len(names) == len(set(names)) == 3 + 4 + 2 + 2 + 3 + 3
    for row in record["rows"]:
        assert "failed" not in row["note"], row
        assert (row["value"] is None) == ("idle" in row["name"]), row  # no kernel runs on a CPU
    assert all(row["share"] > 0 for row in record["rows"] if row["name"].startswith(("decode,", "prefill")))


def test_a_host_without_a_gpu_says_so() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, BENCHMARKS / "gpu.py"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "there is nothing to measure: device must be cpu" in done.stdout


def test_targets() -> None:
    from on_gpu.record import Record, Row, markdown

    rows = [
        Row(name="a", value=1.0, share=0.8, at_least=0.8),
        Row(name="b", value=1.0, share=0.79, at_least=0.8),
        Row(name="c", value=2.9, below=3.0),
        Row(name="d", value=3.0, below=3.0),
        Row(name="e", below=3.0, note="failed: x"),
        Row(name="f", value=1.0, share=0.1),
    ]
    assert [row.is_met for row in rows] == [True, False, True, False, None, None]
    page = markdown(Record(device="x", date="y", versions={}, subject="z", seconds=1, rows=rows))
    assert "| b | 1 | 79% | >= 80% | **no** |" in page
    assert "| e | - (failed: x) |  | < 3 | not measured |" in page


@settings(deadline=None)  # the first one imports torch
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), min_size=1, max_size=20))
def test_idle_is_what_no_span_covers(starts: list[tuple[int, int]]) -> None:
    from on_gpu.engine import device_spans, idle_of

    covered = np.zeros(70, bool)
    for start, size in starts:
        covered[start : start + size] = True
    first, end = covered.argmax(), len(covered) - covered[::-1].argmax()
    events = [{"ph": "X", "cat": "kernel", "ts": start, "dur": size} for start, size in starts]
    events.append({"ph": "X", "cat": "cpu_op", "ts": 0, "dur": 1000})
    idle = idle_of(device_spans({"traceEvents": events}))
    assert idle is not None
    assert idle.share == pytest.approx(1 - covered[first:end].mean())
    runs = "".join("x" if one else "." for one in covered[first:end]).split("x")
    assert idle.for_host == pytest.approx(sum(len(run) for run in runs if len(run) > 10) / (end - first))
    assert idle_of([]) is None


@settings(deadline=None)  # the first one imports torch
@given(st.integers(1, 8), st.integers(1, 100), st.integers(1, 40), st.integers(1, 200))
def test_pages_that_are_written_belong_to_one_request(batch: int, context: int, num_more: int, num_pages: int) -> None:
    from on_gpu.steps import row_pages
    from on_gpu.subject import PAGE_SIZE

    try:
        pages = row_pages(batch, context, num_more, num_pages)
    except ValueError:
        return
    assert pages.shape == (batch, -(-(context + num_more) // PAGE_SIZE))
    assert ((pages >= 0) & (pages < num_pages)).all()
    written = pages[:, context // PAGE_SIZE :]
    assert len(np.unique(written)) == written.size
    assert not np.isin(written, pages[:, : context // PAGE_SIZE]).any()
    for row in pages:
        assert len(np.unique(row)) == len(row)


def test_work_of_a_prefill_is_that_of_its_matrices() -> None:
    from on_gpu.steps import prefill_flops
    from on_gpu.subject import LLAMA_8B

    assert prefill_flops(LLAMA_8B, 8192) == pytest.approx(2 * 6.98e9 * 8192 + 17.6e12, rel=0.01)
