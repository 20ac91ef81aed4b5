"""The host cache of ranks on CUDA devices without a GPU: each rank copies its part, and a page has all parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuda_ranks import use_stand_ins
from group_in_threads import ranks_are_threads
from pagewood.engine.api import SamplingParams
from pagewood.engine.offline.llm import LLM
from pagewood.engine.runner.cuda import pages_of_ranks
from pagewood.engine.runner.cuda.pages_of_ranks import ImageParts
from ranked_engines import group_of, is_alive
from seeded_faults import Edit, seed_fault

PROMPT = list(range(100, 200))
OTHERS = [list(range(start, start + 100)) for start in range(200, 400, 50)]
SAMPLING = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
Found = list[tuple[tuple[int, ...], int]]


def recalled(folder: Path, *, num_starts: int = 1, **options: Any) -> Found:
    """Return the tokens of a prompt and how many were cached, before it was evicted and afterwards."""
    whole: dict[str, Any] = {
        "device": "cuda", "dtype": "float16", "max_running": 4, "max_length": 200, "max_total_tokens": 256,
        "host_cache_gb": 0.02, "disk_cache_path": str(folder), "disk_cache_gb": 0.05,
    }  # fmt: skip
    found: Found = []
    for _ in range(num_starts):
        with LLM(**{**whole, **options}) as llm:
            found += [(one.tokens, one.num_cached_tokens) for one in llm.generate(PROMPT, SAMPLING)]
            llm.generate(OTHERS, SAMPLING)  # evicts it
            found += [(one.tokens, one.num_cached_tokens) for one in llm.generate(PROMPT, SAMPLING)]
    return found


@pytest.mark.usefixtures("patient_requests")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"tensor_parallel_size": 2}, id="ranks"),
        pytest.param({"pipeline_parallel_size": 2}, id="stages", marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, id="both", marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2, "speculative": "ngram"}, id="drafts", marks=pytest.mark.slow),
    ],
)
def test_pages_of_all_ranks_come_back_from_host_and_disk(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV that another engine has computed is read by all ranks; wrong KV would change the tokens."""
    use_stand_ins(monkeypatch)
    ranks_are_threads(monkeypatch)
    found = recalled(tmp_path, num_starts=2, **options)
    assert [num for _, num in found] == [0, 96, 96, 96]
    assert len({tokens for tokens, _ in found}) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("patient_requests")
def test_processes_share_the_memory_of_the_host_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_ins(monkeypatch)
    options: dict[str, Any] = {"device": "cuda", "dtype": "float16", "max_running": 4, "max_length": 200}
    options |= {"max_total_tokens": 256, "host_cache_gb": 0.02, "tensor_parallel_size": 2}
    with LLM(**options) as llm:
        pids = group_of(llm).pids()
        first = llm.generate(PROMPT, SAMPLING)
        llm.generate(OTHERS, SAMPLING)
        again = llm.generate(PROMPT, SAMPLING)
    assert [one.tokens for one in again] == [one.tokens for one in first]
    assert [one.num_cached_tokens for one in again] == [96]
    assert not any(map(is_alive, pids))


FAULTS: dict[str, Edit] = {
    "a rank copies nothing in": (pages_of_ranks, "_copied", "own.write(pages, memory, slots, _ignore)", "pass"),
    "a rank copies to the part of another one": (ImageParts, "of", "ends[rank] : ends[rank + 1]", "ends[0] : ends[1]"),
}


@pytest.mark.usefixtures("patient_requests")
@pytest.mark.parametrize("name", FAULTS)
def test_a_part_that_is_wrong_changes_the_tokens(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_ins(monkeypatch)
    ranks_are_threads(monkeypatch)
    seed_fault([FAULTS[name]], monkeypatch)
    found = recalled(tmp_path, tensor_parallel_size=2)
    assert found[0][0] != found[1][0]


def test_parts_of_an_image_lie_side_by_side() -> None:
    images = np.arange(20, dtype=np.uint8).reshape(2, 10)
    parts = ImageParts(sizes=[2, 5, 3])
    assert parts.num_bytes == 10
    assert [parts.of(images, rank)[1].tolist() for rank in range(3)] == [[10, 11], [12, 13, 14, 15, 16], [17, 18, 19]]
