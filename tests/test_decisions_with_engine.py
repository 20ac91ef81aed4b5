"""The simulator and the engine take the same decisions: on the same trace, every step has the same grants.

The engine computes on the simulated device in virtual time, whose steps take what the machine of the simulator takes,
in the plain loop: the simulator retires a step before it plans the next. Compared are, for every step: which requests
hold memory (so preemptions too), which positions decode, and the chunks of prompts in the order in which they are
granted (so admissions, hits and deferral too). A step that begins at another time would take in other arrivals.

What differs, and why it may:

    overlap             The overlapped loop of the engine learns one step later of an end and of what has been cached.
    namespaces          Tenants of the engine share no cached prefix; in a trace they do if they share keys, which those
                        of these traces do not.
    parts of pages      The tree order of the engine compares tokens, so requests that share a part of their first page
                        are a family; the names of pages in a trace say nothing of parts of pages.
    256 examined        The engine looks at 256 waiting requests in a step at most, so that a step has a bound.
    250,000 compared    For deferral the engine compares this many tokens in a step at most, for the same reason; names
                        of pages cost nothing to compare.

Seeded faults that were found: no part of a step is left to waiting requests; pages of decoding requests are taken at
once instead of singly; requests that end together are released by arrival instead of by rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest

from pagewood.engine.api import EngineConfig, SamplingParams, Submit
from pagewood.engine.assemble import assemble
from pagewood.engine.core.loop import Engine, EngineInfo, Pending
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.testing import SimulatedDevice, VirtualClock, seconds_by
from pagewood.radixcache import RadixCache
from pagewood.schedpolicy import ORDERS, NewTokenRatio, StepModel, decode_first
from pagewood.schedpolicy.simulation import (
    BlockCache,
    Decision,
    Fleet,
    Machine,
    OverTokens,
    Trace,
    TraceRequest,
    policies_named,
    simulate,
)
from pagewood.schedpolicy.steps.latency import pairs_of

PAGE = 16
MACHINE = Machine(
    name="test", source="test", model=StepModel(base_s=0.01, prefill_s=5e-5, decode_s=1e-4, kv_s=1e-7, pair_s=2e-7)
)
VOCAB_SIZE = 1 << 20
EOS = VOCAB_SIZE - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The grants of one step; requests by their number in the trace."""

    running: tuple[int, ...]
    decodes: tuple[tuple[int, int], ...]
    prompts: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What both are configured with."""

    policy: str = "fcfs"
    num_pages: int = 128
    chunk: int = 128
    max_running: int = 8
    max_prefills: int = 8
    joint: int | None = None
    prefill_first: bool = False
    conservativeness: float = 1.0


def crowd(*, seed: int, num: int = 40) -> Trace:
    """Requests that come faster than they are served, with shared prefixes, tenants and priorities."""
    rng = Random(seed)
    requests: list[TraceRequest] = []
    stems = {name: tuple(range(1000 * index, 1000 * index + 30)) for index, name in enumerate("abc")}
    now_s, next_key = 0.0, 10_000
    for _ in range(num):
        tenant = rng.choice("abc")
        stem = stems[tenant][: rng.choice((0, 2, 10, 30))]
        num_prompt = len(stem) * PAGE + rng.randint(2, 150)
        num_output = rng.randint(2, 90)
        num_own = (num_prompt + num_output) // PAGE - len(stem)
        keys = stem + tuple(range(next_key, next_key + num_own))
        next_key += num_own
        requests.append(
            TraceRequest(
                arrived_s=now_s, num_prompt=num_prompt, num_output=num_output,
                max_new_tokens=num_output + rng.choice((0, 0, 10, 200)), keys=keys,
                tenant=tenant, priority=rng.choice((0, 0, 0, 1, 5)), tag=rng.choice(("x", "y", "z")),
                deadline_s=rng.choice((None, 1.0, 30.0)),
            )
        )  # fmt: skip
        now_s += rng.expovariate(12)
    return Trace(name="crowd", requests=tuple(requests), block_size=PAGE)


def texts(trace: Trace) -> list[Int32]:
    """Return the tokens of each request, prompt and output: those of a page follow from its name; the last ends it."""
    vocabulary: dict[int, int] = {}
    found: list[Int32] = []
    for number, (request, names) in enumerate(zip(trace.requests, trace.page_names(PAGE), strict=True)):
        tokens = np.full(request.num_prompt + request.num_output, 100_000 + number, np.int32)
        for page, name in enumerate(names):
            tokens[page * PAGE : (page + 1) * PAGE] = vocabulary.setdefault(name, len(vocabulary))
        tokens[-1] = EOS
        found.append(tokens)
    return found


class Script:
    """Draws tokens that are written in advance, and notes the grants of each step."""

    def __init__(self, scripts: Sequence[Int32], first_decodes: Sequence[int]) -> None:
        self.scripts = scripts
        self.first_decodes = first_decodes
        """The first position of each that can be decoded."""
        self.engine: Engine | None = None
        self.steps: list[Step] = []

    def launch(self, batch: Batch) -> "Written":
        assert self.engine is not None
        running = self.engine._state.running  # pyright: ignore[reportPrivateUsage]
        by_row = {request.row: int(request.request_id) for request in running}
        numbers = [by_row[row] for row in batch.rows.tolist()]
        decoding = set(batch.sampled.tolist()) - set(batch.admitted.tolist())
        decodes: list[tuple[int, int]] = []
        prompts: list[tuple[int, int, int]] = []
        for index, grant in enumerate(zip(numbers, batch.starts.tolist(), batch.counts.tolist(), strict=True)):
            if grant[2] == 1 and index in decoding and grant[1] >= self.first_decodes[grant[0]]:
                decodes.append(grant[:2])
            else:
                prompts.append(grant)
        self.steps.append(
            Step(running=tuple(sorted(by_row.values())), decodes=tuple(sorted(decodes)), prompts=tuple(prompts))
        )
        ends: list[int] = (batch.starts + batch.counts).tolist()
        tokens: list[int] = []
        sampled: list[int] = batch.sampled.tolist()
        for grant in sampled:
            script: list[int] = self.scripts[numbers[grant]].tolist()
            # A step that was launched before an end was known is behind the end of the script.
            tokens += script[ends[grant] :][:1] or [EOS]
        return Written(np.array(tokens, np.int32))

    def close(self) -> None: ...


class Written:
    """A step of a `Script`."""

    def __init__(self, tokens: Int32) -> None:
        self.tokens = tokens

    def wait(self) -> StepResult:
        return StepResult.of_one_each(self.tokens)


def steps_of_engine(trace: Trace, setting: Setting, *, overlap: bool = False) -> tuple[list[Step], int]:
    """Return the grants of the engine, and how many requests it has preempted."""
    # Where prompts come first, their last token alone is computed as the rest of them is.
    first_decodes = [request.num_prompt if setting.prefill_first else 0 for request in trace.requests]
    script, clock = Script(texts(trace), first_decodes), VirtualClock()
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    engine = script.engine = assemble(
        EngineConfig(
            max_running=setting.max_running, chunked_prefill_size=setting.chunk, page_size=PAGE, overlap=overlap,
            schedule_policy=setting.policy, max_prefills=setting.max_prefills, prefill_first=setting.prefill_first,
            schedule_conservativeness=setting.conservativeness, joint_prefill_tokens=setting.joint,
        ),
        info=EngineInfo(
            model_name="none", max_length=4096, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,),
            num_pages=setting.num_pages, page_size=PAGE,
        ),
        make_runner=lambda kv: SimulatedDevice(script, step_s=seconds_by(MACHINE.model), clock=clock),
        inbox=inbox,
        outbox=outbox,
        clock=clock.now,
    )  # fmt: skip
    num_ended, num_sent, requests = 0, 0, trace.requests
    pending: Pending | None = None
    while num_ended < len(requests):
        while num_sent < len(requests) and requests[num_sent].arrived_s <= clock.now():
            request = requests[num_sent]
            inbox.put(
                Submit(
                    request_id=str(num_sent),
                    tokens=script.scripts[num_sent][: request.num_prompt].tobytes(),
                    sampling=SamplingParams(max_tokens=request.max_new_tokens),
                    priority=request.priority,
                    namespace=request.tenant,
                    service_class=request.tag,
                    tag=request.tag,
                    deadline_s=None if request.deadline_s is None else request.arrived_s + request.deadline_s,
                )
            )
            num_sent += 1
        num_steps = len(script.steps)
        pending = engine.advance(pending)
        for delta in outbox.take():
            assert delta.refusal is None, delta.refusal
            num_ended += delta.finish is not None
        if len(script.steps) == num_steps and pending is None and num_sent < len(requests):
            clock.wait_until(requests[num_sent].arrived_s)
    while pending is not None:
        pending = engine.advance(pending)
    engine.close()
    return script.steps, engine.counters().num_preempted


def radix_cache() -> OverTokens:
    return OverTokens(RadixCache(page_size=1), array=lambda numbers: np.array(numbers, np.int32))


def steps_of_simulator(trace: Trace, setting: Setting, *, over_radix: bool = True) -> list[Step]:
    decisions: list[Decision] = []
    budget = decode_first(
        max_running=setting.max_running, max_prefill_tokens=setting.chunk, max_prefills=setting.max_prefills
    )
    policies = policies_named(
        f"{setting.policy}+defer",
        page_size=PAGE,
        budget=replace(budget, prefill_first=setting.prefill_first, joint_prefill_tokens=setting.joint),
    )
    reserve = NewTokenRatio(scale=setting.conservativeness)
    simulate(
        trace,
        Fleet(machine=MACHINE, num_pages=setting.num_pages, page_size=PAGE),
        make_policies=lambda _: replace(policies, reserve=reserve),
        make_cache=radix_cache if over_radix else BlockCache,
        on_decision=decisions.append,
    )
    return [
        Step(
            running=one.running,
            decodes=tuple((number, start + step) for number, start in one.decodes),
            prompts=one.prompts,
        )
        for one in decisions
        for step in range(one.num_steps)
    ]


def random_setting(rng: Random, policy: str) -> Setting:
    return Setting(
        policy=policy,
        num_pages=rng.choice((60, 80, 128, 200)),
        chunk=rng.choice((32, 64, 128, 512)),
        max_running=rng.choice((2, 8, 16)),
        max_prefills=rng.choice((1, 2, 8)),
        prefill_first=rng.random() < 0.3,
        conservativeness=rng.choice((0.05, 0.05, 0.3, 1.0)),
        joint=rng.choice((None, 1, 40, 100)),
    )


def compare(seed: int, setting: Setting, *, over_radix: bool = False) -> int:
    """Compare one crowd; return how many requests were preempted."""
    return compared(crowd(seed=seed), setting, over_radix=over_radix)[1]


def compared(trace: Trace, setting: Setting, *, over_radix: bool = False) -> tuple[list[Step], int]:
    """Compare one trace; return its steps, and how many requests were preempted."""
    engine, num_preempted = steps_of_engine(trace, setting)
    simulated = steps_of_simulator(trace, setting, over_radix=over_radix)
    for index, (found, expected) in enumerate(zip(simulated, engine, strict=False)):
        assert found == expected, f"step {index} with {setting}"
    assert len(simulated) == len(engine)
    return engine, num_preempted


@pytest.mark.parametrize("policy", ORDERS)
def test_every_step_has_the_same_grants(policy: str) -> None:
    compare(1, random_setting(Random(policy), policy))


@pytest.mark.parametrize("prefill_first", [False, True])
def test_requests_are_preempted_alike(prefill_first: bool) -> None:
    setting = Setting(num_pages=60, chunk=64, max_running=16, prefill_first=prefill_first, conservativeness=0.05)
    assert sum(compare(seed, setting, over_radix=seed % 2 == 0) for seed in range(3)) > 2


@pytest.mark.parametrize("seed", [44, 48, 55])
def test_grants_are_taken_back_alike(seed: int) -> None:
    """In each trace, a prompt lacks a page while all requests of lower priority are to decode."""
    setting = Setting(policy="fcfs", num_pages=60, chunk=32, max_running=16, max_prefills=2, conservativeness=0.05)
    assert compare(seed, setting) > 0


def test_a_match_whose_pages_a_prompt_has_taken_is_looked_up_again() -> None:
    """In this trace a prompt in progress goes on within the pass, and evicts what the next request had matched."""
    compare(20, random_setting(Random("20 fair"), "fair"), over_radix=True)


def test_the_last_token_of_a_prompt_takes_as_long_as_a_decode_where_prompts_come_first() -> None:
    """A request that arrives shortly before that step ends is in the next, if the step takes as long in both."""
    model, num_prompt = MACHINE.model, 33
    begun_s = model.step_s(num_prefill=32, num_decode=0, num_kv=0, num_pairs=pairs_of(0, 32))
    as_prompt_s = begun_s + model.step_s(num_prefill=1, num_decode=0, num_kv=0, num_pairs=num_prompt)
    as_decode_s = begun_s + model.step_s(num_prefill=0, num_decode=1, num_kv=num_prompt)
    assert as_prompt_s < as_decode_s
    first, second = (
        TraceRequest(arrived_s=arrived_s, num_prompt=num_prompt, num_output=3, max_new_tokens=3, keys=())
        for arrived_s in (0.0, (as_prompt_s + as_decode_s) / 2)
    )
    trace = Trace(name="two", requests=(first, second), block_size=PAGE)
    steps, _ = compared(trace, Setting(chunk=32, prefill_first=True))
    assert [step.prompts for step in steps[:3]] == [((0, 0, 32),), ((0, 32, 1),), ((1, 0, 32),)]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ORDERS)
def test_many_traces_have_the_same_grants(policy: str) -> None:
    settings = {seed: random_setting(Random(f"{seed} {policy}"), policy) for seed in range(50)}
    assert sum(compare(seed, setting, over_radix=seed % 2 == 0) for seed, setting in settings.items()) > 10


def test_the_overlapped_loop_differs_first_where_it_has_not_learnt_of_an_end() -> None:
    trace = crowd(seed=3)
    trace = replace(trace, requests=tuple(replace(request, arrived_s=0.0, keys=()) for request in trace.requests))
    plain, _ = steps_of_engine(trace, Setting())
    overlapped, _ = steps_of_engine(trace, Setting(), overlap=True)
    first = next(index for index, (one, other) in enumerate(zip(plain, overlapped, strict=False)) if one != other)
    assert set(plain[first - 1].running) - set(plain[first].running)
    assert set(overlapped[first].running) == set(plain[first - 1].running)
