"""Attention by request on CUDA devices without a GPU: stand-ins and gloo, in threads and in processes."""

# pyright: basic
# torch's conversions from numpy have no types.

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributed

from cuda_ranks import answered, small, use_stand_ins
from families.case import build
from families.registry import CASES
from group_in_threads import ranks_are_threads
from pagewood.engine.api import Grammar, PoolingParams, SamplingParams
from pagewood.engine.core.loop import RunnerLostError
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.sampling_table import SamplingArrays
from pagewood.engine.models.shard import Shard
from pagewood.engine.offline.llm import LLM
from pagewood.engine.runner.cuda.division import DividedRows, RequestDivision
from pagewood.engine.runner.cuda.step_arrays import TableShape, step_arrays
from rank_threads import ThreadExchange, on_ranks
from ranked_engines import PROMPTS, mixed_sampling
from seeded_faults import Edit, seed_fault
from stand_ins.nccl_gloo import NCCLGroup
from stand_ins.recording_device import RecordingDevice

NAMES = ("llama", "gemma3", "gemma4-small", "qwen3-moe", "deepseek3")
FEW = ("deepseek3",)
BY_REQUEST: dict[str, Any] = {"tensor_parallel_size": 2, "enable_dp_attention": True}


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines for CUDA, and their other ranks, use the stand-ins."""
    use_stand_ins(monkeypatch)


@pytest.mark.parametrize("name", [one if one in FEW else pytest.param(one, marks=pytest.mark.slow) for one in NAMES])
def test_tokens_are_those_of_one_rank(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_ins: None
) -> None:
    build(CASES[name], tmp_path)
    ranks_are_threads(monkeypatch)
    expected = answered(small(tmp_path))
    assert answered(small(tmp_path, **BY_REQUEST)) == expected
    if name == "qwen3-moe":
        assert answered(small(tmp_path, **BY_REQUEST, expert_parallel=True)) == expected


@pytest.mark.parametrize("name", [one if one in FEW else pytest.param(one, marks=pytest.mark.slow) for one in NAMES])
def test_graphs_have_one_size_on_all_ranks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_ins: None
) -> None:
    build(CASES[name], tmp_path)
    ranks_are_threads(monkeypatch)
    expected = answered(small(tmp_path))
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", NCCLGroup, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    device = RecordingDevice()
    assert answered(small(tmp_path, **BY_REQUEST), device=device) == expected
    assert device.num_replayed > 0


@pytest.mark.slow
def test_processes_have_the_tokens_of_one(stand_ins: None) -> None:
    """With grammars, log probabilities and vectors."""
    whole: dict[str, Any] = {"device": "cuda", "dtype": "float16", "max_running": 8, "max_total_tokens": 1024}
    bound = SamplingParams(max_tokens=12, temperature=1.0, seed=3, grammar=Grammar(kind="regex", text="(ab|cd)+ef"))
    reported = SamplingParams(max_tokens=5, temperature=0.0, logprobs=2, prompt_logprobs=1)
    sampling = [*mixed_sampling(5), bound, reported, bound]
    found: list[Any] = []
    for options in (dict[str, Any](), BY_REQUEST):
        with LLM(**whole, **options) as llm:
            answers = [llm.generate(PROMPTS * 2, sampling) for _ in range(2)]
            found.append([one.tokens for turn in answers for one in turn])
            found.append([one.logprobs for one in answers[0]])
            found.append(llm.embed(PROMPTS, PoolingParams(kind="mean")))
            if options:
                free = llm.counters().free_pages_by_rank
                assert len(free) == 2
                assert max(free) < llm.counters().num_pages // 2, "one rank has not been used"
    assert found[0] == found[3]
    np.testing.assert_allclose(found[2], found[5], atol=3e-2)


FAULTS: dict[str, Edit] = {
    "rows of another rank": (DividedRows, "own", "self.rank * self.num_padded", "(1 - self.rank) * self.num_padded"),
    "sums of one rank": (DividedRows, "sum_own", "self.exchange.sum_ranks(x)", "x"),
    "wanted states of other tokens": (
        RequestDivision, "arrays", "gathered=gathered,", "gathered=gathered[::-1].copy(),"
    ),
    "pages of another rank": (
        RequestDivision, "note", "batch.page_ids % np.int32(self.num_pages)", "batch.page_ids // np.int32(2)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_seeded_faults_are_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_ins: None) -> None:
    build(CASES["deepseek3"], tmp_path)
    ranks_are_threads(monkeypatch)
    expected = answered(small(tmp_path))
    seed_fault([FAULTS[name]], monkeypatch)
    assert answered(small(tmp_path, **BY_REQUEST)) != expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("other pages", "rank 1 has other t"),
        ("other seed", "rank 1 has other tokens"),
    ],
)
def test_a_rank_that_follows_wrongly_ends_its_group(fault: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_ins(monkeypatch, fault=fault)
    options: dict[str, Any] = {"device": "cuda", "dtype": "float16", "max_running": 4, "max_total_tokens": 1024}
    with LLM(**options, **BY_REQUEST) as llm, pytest.raises(RunnerLostError, match=message):
        llm.generate(PROMPTS, mixed_sampling(len(PROMPTS), 60))


def random_batch(rng: random.Random, num_rows: int) -> Batch:
    """Return a step of some rows, whose pages are not new."""
    rows = np.array(rng.sample(range(num_rows), rng.randint(1, num_rows)), np.int32)
    sampled = np.array([index for index in range(len(rows)) if rng.random() < 0.7], np.int32)
    empty = np.empty(0, np.int32)
    return Batch(
        page_rows=empty, page_columns=empty, page_ids=empty, token_rows=empty, token_positions=empty, token_ids=empty,
        rows=rows, starts=np.array([rng.randint(0, 9) for _ in rows], np.int32),
        counts=np.array([rng.randint(1, 5) for _ in rows], np.int32), sampled=sampled,
        num_promised=np.ones(len(sampled), np.int32),
        sampling=SamplingArrays.of([SamplingParams()] * len(sampled), list(range(len(sampled)))),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(10))
def test_every_token_and_every_wanted_state_is_where_all_ranks_expect_it(seed: int) -> None:
    """Over plain numbers: a token's state is its place in the table of tokens."""
    rng, count, num_rows = random.Random(seed), 3, 6
    tables = TableShape(max_rows=num_rows, tokens_per_row=20, pages_per_row=5, page_size=4)
    owners = np.array([rng.randrange(count) for _ in range(num_rows)], np.int32)
    batch = random_batch(rng, num_rows)
    whole = step_arrays(batch, tables)

    def work(shard: Shard, exchange: Callable[[Tensor], list[Tensor]]) -> None:
        own = ThreadExchange(exchange)
        division = RequestDivision(exchange=own, rank=shard.rank, count=count, num_pages=9, owners=owners.copy())
        arrays, rows = division.arrays(batch, tables)
        states = torch.from_numpy(arrays.sources)[:, None].float()
        mine = rows.own(states)
        assert len(mine) == len(arrays.positions)
        grants = division.own(batch)
        places = step_arrays(grants, tables).sources if len(grants.rows) else []
        assert mine[: len(places), 0].tolist() == list(places)
        gathered = rows.gather(mine)
        assert gathered[torch.from_numpy(np.isin(arrays.sources, whole.sources))].sum() == whole.sources.sum()
        wanted = rows.kept.gather(mine[torch.from_numpy(arrays.wanted).long()])
        found = wanted[torch.from_numpy(arrays.gathered).long()][: len(batch.sampled), 0].tolist()
        assert found == whole.sources[whole.wanted[: len(batch.sampled)]].tolist()
        sums = rows.sum_own(gathered.clone())
        assert torch.equal(sums, count * mine)

    on_ranks(count, work)


@pytest.mark.parametrize("seed", range(10))
def test_every_state_has_a_place_in_the_memory_of_its_rank(seed: int) -> None:
    """In steps with and without drafts; a rank without grants leaves one in the place of its runner."""
    rng, count, num_rows, num_states = random.Random(seed), 3, 6, 7
    tables = TableShape(max_rows=num_rows, tokens_per_row=20, pages_per_row=5, page_size=4, num_states=num_states + 1)
    owners, batch = [rng.randrange(count) for _ in range(num_rows)], random_batch(rng, num_rows)
    states, copies = list[list[int]](), list[list[int]]()
    for grant, (row, start) in enumerate(zip(batch.rows.tolist(), batch.starts.tolist(), strict=True)):
        first, (source, target, saved) = num_states * owners[row], rng.sample(range(num_states), 3)
        states.append([rng.choice((-1, first + source)), first + target])
        copies += [[grant, start + 1, first + saved]] * rng.randrange(2)
    batch = replace(batch, states=np.array(states, np.int32), state_copies=np.array(copies, np.int32).reshape(-1, 3))
    for rank in range(count):
        division = RequestDivision(
            exchange=ThreadExchange(lambda x: [x]), rank=rank, count=count, num_pages=9, num_states=num_states,
            owners=np.array(owners, np.int32),
        )  # fmt: skip
        noted, first = division.note(batch), rank * num_states
        mine = [grant for grant, row in enumerate(batch.rows.tolist()) if owners[row] == rank]
        expected = [[max(-1, place - first) for place in states[grant]] for grant in mine] or [[-1, num_states]]
        copied = {grant: (length, place - first) for grant, length, place in copies}
        saves = [[copied.get(grant, (0, -1))[1]] + [-1] * int(batch.counts[grant] - 1) for grant in mine] or [[-1]]
        arrays, _ = division.arrays(noted, tables)
        assert arrays.states.reshape(-1, 2).tolist() == expected
        assert arrays.state_saves.tolist() == [place for grant in saves for place in grant]
        verified = division.verified(noted, tables).batch
        assert verified.states.tolist() == expected
        found = [[number, *copied[grant]] for number, grant in enumerate(mine) if grant in copied]
        assert verified.state_copies.tolist() == found
