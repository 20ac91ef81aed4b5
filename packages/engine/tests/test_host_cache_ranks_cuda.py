"""The host cache of ranks on CUDA devices without a GPU, on one host and on two: a page is there when all parts are.

With attention by request, each rank copies whole pages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuda_ranks import use_stand_ins
from group_in_threads import ranks_are_threads
from node_threads import following, free_port
from pagewood.engine.api import EngineConfig, SamplingParams
from pagewood.engine.model_folder.folder import model_folder
from pagewood.engine.offline.llm import LLM
from pagewood.engine.runner.cuda.pages_of_ranks import ImageParts, ImageSizes
from pagewood.engine.runner.ranks.ranked_pages import FollowedPages
from ranked_engines import group_of, is_alive
from seeded_faults import Edit, seed_fault, slow_ones

PROMPT = list(range(100, 200))
OTHERS = [list(range(start, start + 100)) for start in range(200, 400, 50)]
SAMPLING = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
DRAFT: dict[str, Any] = {"speculative": "draft", "speculative_model": str(model_folder(None))}
BY_REQUEST: dict[str, Any] = {"tensor_parallel_size": 2, "enable_dp_attention": True, "max_total_tokens": 416}
"""Each rank has memory for a request of the longest length."""
Found = list[tuple[tuple[int, ...], int]]


def recalled(folder: Path, *, num_starts: int = 1, **options: Any) -> Found:
    """Return the tokens of a prompt and how many were cached, before it was evicted and afterwards.

    By request, another one that comes before it is on rank 0.
    """
    whole: dict[str, Any] = {
        "device": "cuda", "dtype": "float16", "max_running": 4, "max_length": 200, "max_total_tokens": 256,
        "host_cache_gb": 0.02, "disk_cache_path": str(folder), "disk_cache_gb": 0.05,
    }  # fmt: skip
    found: Found = []
    for _ in range(num_starts):
        own: dict[str, Any] = {**whole, **options}
        own |= {"master_addr": f"127.0.0.1:{free_port()}"} if "nnodes" in options else {}
        asked = [list(range(400, 500)), PROMPT] if "enable_dp_attention" in options else [PROMPT]
        with following(EngineConfig(**own)) as errors, LLM(**own) as llm:
            for _ in range(2):
                last = llm.generate(asked, SAMPLING)[-1]
                found.append((last.tokens, last.num_cached_tokens))
                llm.generate(OTHERS, SAMPLING)  # evicts it
        assert not errors
    return found


@pytest.mark.usefixtures("patient_requests")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"tensor_parallel_size": 2}, id="ranks"),
        pytest.param({"pipeline_parallel_size": 2}, id="stages", marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, id="both", marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2, "speculative": "ngram"}, id="drafts", marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel_size": 2, **DRAFT}, id="stages draft", marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2, "nnodes": 2}, id="hosts", marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 4, "nnodes": 2}, id="hosts of two", marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel_size": 2, "nnodes": 2}, id="stages over hosts", marks=pytest.mark.slow),
        pytest.param(BY_REQUEST, id="by request", marks=pytest.mark.slow),
        pytest.param({**BY_REQUEST, **DRAFT}, id="by request draft", marks=pytest.mark.slow),
        pytest.param({**BY_REQUEST, "nnodes": 2}, id="by request over hosts", marks=pytest.mark.slow),
        pytest.param(
            {**BY_REQUEST, "tensor_parallel_size": 4, "max_total_tokens": 832, "nnodes": 2},
            id="by request over hosts of two",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_pages_of_all_ranks_come_back_from_host_and_disk(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV that another engine has computed is read by all ranks; wrong KV would change the tokens."""
    use_stand_ins(monkeypatch)
    ranks_are_threads(monkeypatch)
    found = recalled(tmp_path, num_starts=2, **options)
    first, again, restarted, last = (num for _, num in found)
    assert (first, again, last) == (0, 96, 96)
    assert restarted >= (80 if "enable_dp_attention" in options else 96)  # two ranks evict beside each other
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


@pytest.mark.slow
@pytest.mark.usefixtures("patient_requests")
def test_stages_may_copy_pages_before_they_draft_and_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages of a prompt are copied while the first step with drafts computes what a draft model has of them."""
    use_stand_ins(monkeypatch)
    ranks_are_threads(monkeypatch)
    began = "images, slots = self._images, message.slots"
    late: Edit = (FollowedPages, "_moved", began, f"__import__('time').sleep(0.3 * message.is_out); {began}")
    seed_fault([late], monkeypatch)
    found = recalled(tmp_path, pipeline_parallel_size=2, **DRAFT, speculative_control="fixed")
    assert [num for _, num in found] == [0, 96]
    assert len({tokens for tokens, _ in found}) == 1


NOTHING_IN: Edit = (FollowedPages, "_moved", "self._own.write(message.pages, images, slots, _ignore)", "pass")
FAULTS: dict[str, tuple[Edit, dict[str, Any]]] = {
    "a rank copies nothing in": (NOTHING_IN, {}),
    "a rank of another host copies nothing in": (NOTHING_IN, {"nnodes": 2}),
    "a rank copies nothing of its own requests in": (NOTHING_IN, BY_REQUEST),
    "a rank copies to the part of another one": (
        (ImageParts, "of", "ends[rank] : ends[rank + 1]", "ends[0] : ends[1]"), {}
    ),
}  # fmt: skip


@pytest.mark.usefixtures("patient_requests")
@pytest.mark.parametrize("name", slow_ones(FAULTS, *list(FAULTS)[1:]))
def test_a_part_that_is_wrong_changes_the_tokens(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_ins(monkeypatch)
    ranks_are_threads(monkeypatch)
    edit, options = FAULTS[name]
    seed_fault([edit], monkeypatch)
    found = recalled(tmp_path, **{"tensor_parallel_size": 2, **options})
    assert len({tokens for tokens, _ in found}) > 1


def test_parts_of_an_image_lie_side_by_side() -> None:
    images = np.arange(20, dtype=np.uint8).reshape(2, 10)
    parts = ImageParts(sizes=[2, 5, 3])
    assert parts.num_bytes == 10
    assert [parts.of(images, rank)[1].tolist() for rank in range(3)] == [[10, 11], [12, 13, 14, 15, 16], [17, 18, 19]]


def test_ranks_have_as_many_parts_of_a_state_as_the_one_with_most() -> None:
    assert ImageSizes.of([5, 7], [0, 0]) == ImageSizes(by_rank=[5, 7], num_state_parts=0)
    assert ImageSizes.of([100, 300], [1000, 0]) == ImageSizes(by_rank=[100, 300], num_state_parts=10)
    assert ImageSizes.of([64, 64], [128_000, 6400]) == ImageSizes(by_rank=[256, 64], num_state_parts=512)
