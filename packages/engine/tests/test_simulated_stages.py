"""Stages of simulated devices: how long they are idle, and how chunks of long prompts are cut. No wall time is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from pagewood.engine.api import EngineConfig, SamplingParams, Submit
from pagewood.engine.assemble import assemble
from pagewood.engine.core.loop import Engine, EngineInfo, Pending
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.steps import equal_chunks, stage_turns
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.testing.made_up_tokens import MadeUpTokens
from pagewood.engine.testing.simulated_device import VirtualClock
from seeded_faults import seed_fault
from simulated_stages import SimulatedStages

MAX_LENGTH = 40_000
STAGE_S = 0.010


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """An engine, its devices, and where commands go in."""

    engine: Engine
    device: SimulatedStages
    inbox: MemoryInbox

    def submit(self, num_prompt: int, num_output: int, *, name: str) -> None:
        tokens = (1 + np.arange(num_prompt, dtype="<i4") % 997).tobytes()
        sampling = SamplingParams(max_tokens=num_output, ignore_eos=True)
        self.inbox.put(Submit(request_id=name, tokens=tokens, sampling=sampling, namespace=name))

    def run(self, num_steps: int, pending: Pending | None = None) -> Pending | None:
        for _ in range(num_steps):
            pending = self.engine.advance(pending)
        return pending

    def run_until_idle(self) -> None:
        pending = self.engine.advance(None)
        while pending is not None or self.engine.counters().num_running:
            pending = self.engine.advance(pending)


def simulated(
    num_stages: int,
    stage_s: Sequence[Callable[[Batch], float]],
    *,
    max_running: int = 64,
    chunk: int = 512,
    host_s: float = 0.0,
    overlap: bool = False,
) -> Simulated:
    config = EngineConfig(
        pipeline_parallel_size=num_stages, max_running=max_running, chunked_prefill_size=chunk, page_size=16,
        max_prefills=max_running, overlap=overlap,
    )  # fmt: skip
    inbox, clock, devices = MemoryInbox(), VirtualClock(), list[SimulatedStages]()

    def make_runner(_: object) -> SimulatedStages:
        runner = MadeUpTokens(num_rows=config.num_rows, vocab_size=1000)
        devices.append(SimulatedStages(runner, stage_s=stage_s, clock=clock, host_s=host_s))
        return devices[0]

    engine = assemble(
        config,
        info=EngineInfo(
            model_name="simulated", max_length=MAX_LENGTH, vocab_size=1000, eos_token_ids=(),
            num_pages=max_running * 64 + MAX_LENGTH // 16, page_size=16,
        ),
        make_runner=make_runner, inbox=inbox, outbox=MemoryOutbox(), clock=clock.now,
    )  # fmt: skip
    return Simulated(engine=engine, device=devices[0], inbox=inbox)


def always(batch: Batch) -> float:
    del batch
    return STAGE_S


def idle_shares(
    num_stages: int, num_requests: int, *, some_end: bool = False, host_s: float = 0.0, overlap: bool = False
) -> list[float]:
    """Return the part of time in which each stage is idle in steady decoding, after requests have come all at once."""
    one = simulated(num_stages, [always] * num_stages, host_s=host_s, overlap=overlap)
    for index in range(num_requests):
        ends_early = some_end and index % 5 == 0  # then steps become uneven
        one.submit(3 + index % 4, 40 if ends_early else 900, name=str(index))
    pending = one.run(300)
    one.device.forget_times()
    pending = one.run(500, pending)
    shares = [times.idle_share for times in one.device.times()]
    assert all(times.num_steps > 100 for times in one.device.times())
    one.run_until_idle()
    one.engine.close()
    return shares


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize(("num_others", "some_end"), [(0, False), (1, False), (2, False), (29, True), (2, True)])
def test_stages_are_hardly_idle_in_steady_decoding(num_stages: int, num_others: int, some_end: bool) -> None:
    """From as many requests on as there are stages."""
    assert max(idle_shares(num_stages, num_stages + num_others, some_end=some_end)) < 0.05


@pytest.mark.parametrize("num_stages", [2, 4])
def test_with_overlap_stages_do_not_wait_for_the_host(num_stages: int) -> None:
    """A host that takes half of the time of a stage: without overlap the first stage waits for it in every step."""
    host_s = STAGE_S / 2
    assert min(idle_shares(num_stages, 24, host_s=host_s)) > 0.1
    assert max(idle_shares(num_stages, 24, host_s=host_s, overlap=True)) < 0.05
    assert max(idle_shares(num_stages, 24, some_end=True, overlap=True)) < 0.05


DIVIDED = "min(-(-len(ready) // num_free), -(-(len(waiting) + len(ready)) // self.most_in_flight))"
FAULTS: dict[str, tuple[str, int]] = {
    "one step takes all requests": ("1000", 32),
    "half of the stages get a step": ("-(-(2 * (len(waiting) + len(ready))) // self.most_in_flight)", 32),
    "nothing is left for a stage without a step": ("-(-(len(waiting) + len(ready)) // self.most_in_flight)", 5),
}


@pytest.mark.parametrize("name", FAULTS)
def test_requests_that_are_divided_badly_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, num_requests = FAULTS[name]
    seed_fault([(stage_turns.StageTurns, "sitting_out", DIVIDED, fault)], monkeypatch)
    assert max(idle_shares(4, num_requests)) > 0.2


def chunks_of(one: Simulated, name: str) -> list[tuple[int, int]]:
    """Return start and tokens of the chunks of a prompt that nothing else interrupts, its last one left out."""
    found: list[tuple[int, int]] = []
    pending, began = one.engine.advance(None), False
    while not began or name in one.engine._state.by_id:  # pyright: ignore[reportPrivateUsage]
        began = True
        stages = one.engine._stages  # pyright: ignore[reportPrivateUsage]
        assert stages is not None
        for step in stages.in_flight:
            for grant in step.grants:
                if grant.request.request_id == name and (not found or grant.start > found[-1][0]):
                    found.append((grant.start, grant.num_tokens))
        pending = one.engine.advance(pending)
    one.run_until_idle()
    return [chunk for chunk in found if sum(chunk) < 30_000]


def seconds(batch: Batch) -> float:
    """Return how long a stage takes: a base, tokens, and pairs, which take as long as tokens 8,000 tokens on."""
    starts, counts = batch.starts.astype(np.int64), batch.counts.astype(np.int64)
    pairs = int((counts * starts + counts * (counts + 1) // 2).sum())
    return 0.002 + 1e-5 * int(counts.sum()) + 1e-5 / 8_000 * pairs


def chunk_s(start: int, count: int) -> float:
    return 0.002 + 1e-5 * count + 1e-5 / 8_000 * (count * start + count * (count + 1) // 2)


def test_chunks_of_a_long_prompt_take_equal_time() -> None:
    """After some steps have been measured, chunks shrink, and the stages hardly wait for each other."""
    one = simulated(4, [seconds] * 4, chunk=1024)
    for index in range(2):  # they are measured: the first with chunks of one size
        one.submit(30_000, 1, name=str(index))
        one.run_until_idle()
    one.submit(30_000, 1, name="last")
    chunks = chunks_of(one, "last")
    one.engine.close()
    assert sum(count for _, count in chunks) > 28_000
    sizes = [count for _, count in chunks]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 1024
    assert sizes[-1] < 300
    times = [chunk_s(start, count) for start, count in chunks]
    assert max(times) < 1.2 * min(times)  # chunks of one size would take up to four times as long


def test_chunks_that_do_not_shrink_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    seed_fault([(equal_chunks.EqualChunks, "_fit", "self.pair_tokens =", "unused =")], monkeypatch)
    with pytest.raises(AssertionError):
        test_chunks_of_a_long_prompt_take_equal_time()
