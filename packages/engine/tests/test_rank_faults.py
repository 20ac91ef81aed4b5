"""Ranks that compute something else than rank 0: each is found, and the group ends.

The ranks are threads here, with the real programs, exchanges and messages.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from backwards import seed_backwards
from pagewood.engine.api import EngineConfig, SamplingParams
from pagewood.engine.assembly.cpu.rank import CPURank
from pagewood.engine.core.loop import Runner, RunnerLostError
from pagewood.engine.model_folder.folder import model_folder
from pagewood.engine.model_folder.model_digest import ModelDigest
from pagewood.engine.models.shard import Shard
from pagewood.engine.runner.ranks import following
from pagewood.engine.runner.ranks.notes import StepNotes
from pagewood.engine.runner.ranks.ranked_runner import RankedRunner
from pagewood.engine.runner.ranks.segment import Segment
from row_driver import RowDriver
from seeded_faults import Edit, seed_fault
from thread_ranks import ThreadRanks

NUM_PAGES, PAGE_SIZE, MAX_LENGTH = 64, 4, 200


def ranked(count: int, **options: float) -> RankedRunner:
    """Return the embedded model on ranks in threads."""
    folder = model_folder(None)
    config = EngineConfig(max_running=4, page_size=PAGE_SIZE, max_total_tokens=NUM_PAGES * PAGE_SIZE).resolved()

    def make(segment: Segment, number: int) -> Runner:
        rank = CPURank(
            config,
            folder,
            ModelDigest(folder),
            num_threads=1,
            shard=Shard(number, count),
            exchange=segment.exchange(number),
        )
        rank.compile()
        rank.allocate(NUM_PAGES, 0)
        return rank.make_runner(max_length=MAX_LENGTH, processors=None, watch=StepNotes(segment, number))

    group = ThreadRanks(count, make, **options)
    return RankedRunner(group.runner, group)


def generated(runner: RankedRunner, num_tokens: int) -> list[list[int]]:
    driver = RowDriver(runner, num_pages=NUM_PAGES, page_size=PAGE_SIZE)
    sampling = SamplingParams(temperature=1.0)
    sequences = [driver.add([5, 6, 7, 8 + i], sampling=sampling, seed=i) for i in range(2)]
    driver.generate(sequences, num_tokens=num_tokens, chunk=3)
    return [one.output for one in sequences]


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_that_compute_the_same_agree(count: int) -> None:
    runner = ranked(count)
    outputs = generated(runner, 40)
    assert [len(one) for one in outputs] == [40, 40]
    runner.close()


def test_another_order_of_additions_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seed_backwards(2, monkeypatch)
    runner = ranked(4)
    with pytest.raises(RunnerLostError, match="rank 2 has other tokens or hidden states than rank 0 after step"):
        generated(runner, 40)
    runner.close()


_SKIP = """number += 1
                if number == 9:
                    continue"""
_OLD_PAGES = """assert isinstance(batch, Batch)
                batch = replace(batch, page_ids=batch.page_ids * 0)"""
_OTHER_SEED = """assert isinstance(batch, Batch)
                batch.sampling.words[:, 0] += 1"""
FAULTS: dict[str, tuple[Edit, str]] = {
    "a step is skipped": ((following, "_follow", "number += 1", _SKIP), "rank 1 does not take part in a step"),
    "page tables are old": (
        (following, "_follow", "assert isinstance(batch, Batch)", _OLD_PAGES),
        "rank 1 has other tables of rows than rank 0 after step 16",
    ),
    "tokens are drawn with another seed": (
        (following, "_follow", "assert isinstance(batch, Batch)", _OTHER_SEED),
        "rank 1 has other tokens or hidden states than rank 0",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_rank_that_differs_ends_its_group(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    edit, message = FAULTS[name]
    monkeypatch.setattr(following, "replace", replace, raising=False)  # for the code of the faults
    seed_fault([edit], monkeypatch)
    runner = ranked(2, heartbeat_s=1.0)
    with pytest.raises(RunnerLostError, match=message):
        generated(runner, 40)
    runner.close()
