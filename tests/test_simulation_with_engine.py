"""The simulator finds the same hits as the engine, on the same trace, with the same room, limits and durations."""

from random import Random

import numpy as np
import pytest

from pagewood.engine.api import EngineConfig, SamplingParams, Submit
from pagewood.engine.assemble import assemble
from pagewood.engine.core.loop import EngineInfo
from pagewood.engine.core.memory import kv
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.schedpolicy import Budget, StepModel
from pagewood.schedpolicy.simulation import Fleet, Machine, Trace, TraceRequest, memory, policies_named, simulate

PAGE = 16
MACHINE = Machine(name="test", source="test", model=StepModel(base_s=0.01, prefill_s=5e-5, decode_s=1e-4, kv_s=0.0))
MAX_RUNNING, CHUNK = 16, 512


def conversations(*, seed: int, num: int) -> Trace:
    """Conversations with a shared system prompt, whose prompts and outputs end inside pages."""
    rng = Random(seed)
    requests: list[TraceRequest] = []
    system, next_key = tuple(range(8)), 8
    for _ in range(num):
        now_s, num_so_far, keys = rng.uniform(0, 60), 8 * PAGE, system
        for _ in range(rng.randint(1, 5)):
            num_prompt = num_so_far + rng.randint(5, 200)
            num_output = rng.randint(2, 60)
            num_so_far = num_prompt + num_output
            num_new = num_so_far // PAGE - len(keys)
            keys += tuple(range(next_key, next_key + num_new))
            next_key += num_new
            # Half of the turns are edited afterwards, so nothing repeats their output.
            shown = keys if rng.random() < 0.5 else keys[: num_prompt // PAGE]
            requests.append(
                TraceRequest(
                    arrived_s=now_s, num_prompt=num_prompt, num_output=num_output, max_new_tokens=num_output, keys=shown
                )
            )
            keys, num_so_far = shown, num_so_far if shown is keys else len(shown) * PAGE
            now_s += rng.expovariate(1 / 10)
    requests.sort(key=lambda request: request.arrived_s)
    return Trace(name="conversations", requests=tuple(requests), block_size=PAGE)


def texts(trace: Trace) -> list[np.ndarray[tuple[int], np.dtype[np.int32]]]:
    """Return tokens for each request, prompt and output: those of a page follow from its name."""
    vocabulary: dict[int, int] = {}
    found: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
    for number, (request, names) in enumerate(zip(trace.requests, trace.page_names(PAGE), strict=True)):
        tokens = np.full(request.num_prompt + request.num_output, 100_000 + number, np.int32)
        for page, name in enumerate(names):
            tokens[page * PAGE : (page + 1) * PAGE] = vocabulary.setdefault(name, len(vocabulary))
        found.append(tokens)
    return found


class ScriptedRunner:
    """A device whose output is written in advance, and whose steps take the time of the machine's model."""

    def __init__(self, texts: list[np.ndarray[tuple[int], np.dtype[np.int32]]]) -> None:
        self.texts = texts
        self.row_texts: dict[int, np.ndarray[tuple[int], np.dtype[np.int32]]] = {}
        self.step_s = 0.0

    def launch(self, batch: Batch) -> "ScriptedRunner":
        limits = batch.limits.tolist()
        for index, (grant, row) in enumerate(zip(batch.admitted.tolist(), batch.admitted_rows(), strict=True)):
            known = batch.token_ids[batch.token_rows == row]
            start = int(batch.starts[grant])
            (text,) = {
                id(text): text
                for text in self.texts
                if len(text) == limits[index] and np.array_equal(text[start : start + len(known)], known)
            }.values()
            self.row_texts[row] = text
        ends = batch.starts + batch.counts
        self.tokens = np.array(
            [self.row_texts[int(batch.rows[grant])][ends[grant]] for grant in batch.sampled.tolist()], np.int32
        )
        is_decode = batch.counts == 1
        self.step_s = MACHINE.model.step_s(
            num_prefill=int(batch.counts[~is_decode].sum()), num_decode=int(is_decode.sum()), num_kv=0
        )
        return self

    def wait(self) -> StepResult:
        return StepResult.of_one_each(self.tokens)

    def close(self) -> None: ...


def hits_of_engine(trace: Trace, *, num_pages: int, policy: str) -> list[int]:
    """Return the cached tokens of each request at its first admission."""
    scripts = texts(trace)
    runner, inbox, outbox = ScriptedRunner(scripts), MemoryInbox(), MemoryOutbox()
    now_s = 0.0
    engine = assemble(
        EngineConfig(
            max_running=MAX_RUNNING, chunked_prefill_size=CHUNK, page_size=PAGE, schedule_policy=policy, overlap=False
        ),
        info=EngineInfo(
            model_name="none", max_length=4096, vocab_size=1 << 20, eos_token_ids=(), num_pages=num_pages,
            page_size=PAGE,
        ),
        make_runner=lambda kv: runner,
        inbox=inbox,
        outbox=outbox,
        clock=lambda: now_s,
    )  # fmt: skip
    hits, ended, num_sent = [-1] * len(trace.requests), 0, 0
    while ended < len(trace.requests):
        while num_sent < len(trace.requests) and trace.requests[num_sent].arrived_s <= now_s:
            request = trace.requests[num_sent]
            inbox.put(
                Submit(
                    request_id=str(num_sent),
                    tokens=scripts[num_sent][: request.num_prompt].tobytes(),
                    sampling=SamplingParams(max_tokens=request.num_output, ignore_eos=True),
                )
            )
            num_sent += 1
        runner.step_s = 0.0
        engine.step()
        deltas = outbox.take()
        for delta in deltas:
            assert delta.refusal is None, delta.refusal
            if delta.first:
                hits[int(delta.request_id)] = delta.num_cached_tokens
            ended += delta.finish is not None
        now_s += runner.step_s
        if not runner.step_s and num_sent < len(trace.requests):
            now_s = max(now_s, trace.requests[num_sent].arrived_s)
    return hits


def hits_of_simulator(trace: Trace, *, num_pages: int, policy: str) -> list[int]:
    budget = Budget(
        max_step_tokens=CHUNK + MAX_RUNNING,
        max_chunk_tokens=CHUNK,
        max_running=MAX_RUNNING,
        max_prefills=8,
        max_prefill_tokens=CHUNK,
    )
    (observed,) = simulate(
        trace,
        Fleet(machine=MACHINE, num_pages=num_pages, page_size=PAGE),
        make_policies=lambda _: policies_named(f"{policy}+defer", page_size=PAGE, budget=budget),
    )
    return [record.num_hit for record in sorted(observed.records, key=lambda record: record.arrival)]


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
@pytest.mark.parametrize("num_pages", [300, 700])
@pytest.mark.parametrize("is_large", [False, True])
def test_hits_are_those_of_the_engine(policy: str, num_pages: int, is_large: bool, monkeypatch: pytest.MonkeyPatch):
    """Also where an eviction frees what requests need and not a share of the pool, as in a pool of a million tokens."""
    if is_large:
        for module in (kv, memory):
            monkeypatch.setattr(module, "_SPARE_SHARE", 4)
            monkeypatch.setattr(module, "_SPARE_TOKENS", 64)
    trace = conversations(seed=1, num=60)
    engine = hits_of_engine(trace, num_pages=num_pages, policy=policy)
    simulated = hits_of_simulator(trace, num_pages=num_pages, policy=policy)
    assert sum(engine) > 1000
    assert simulated == engine
