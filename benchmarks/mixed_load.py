# pyright: reportPrivateUsage=false
"""Compares the mixing presets under long prompts among streaming chats, in the engine and in the simulator.

python benchmarks/mixed_load.py                       # about ten minutes on two cores
python benchmarks/mixed_load.py --preset stall-free --rounds 1
python benchmarks/mixed_load.py --quick               # a tiny model, only to test the script

Requests arrive at times that do not depend on answers, the same in the engine and in the simulator. The model has 110M
random weights, as in cpu_end_to_end.py. The steps of this machine are measured before and after, and a model of them is
fitted to both. From it follow the rates: --load is a part of what the simulator computes per second when all requests
are there at once. The last table says how much longer the steps of the engine took than the model says, which depends
on the model and on what else the machine did. The simulator gets the model times this factor, so the other tables
compare what was decided. Times count from a request's arrival, percentiles are by nearest rank.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pagewood.engine.api import EngineConfig, SamplingParams, Submit
from pagewood.engine.core.loop import Runner, StepHandle
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.testing import seconds_by
from pagewood.schedpolicy import MIXINGS, StepModel, budget_named
from pagewood.schedpolicy.simulation import Fleet, Machine, Trace, TraceRequest, policies_named, simulate
from pagewood.schedpolicy.simulation.histogram import DurationHistogram
from pagewood.schedpolicy.simulation.report import records_of, spread_of

if TYPE_CHECKING:
    from end_to_end.model import ModelShape
    from pagewood.engine.core.loop import Engine, Pending
    from step_model import Shapes

CHATS_PER_LONG = 8
POOL_TOKENS = 32_768
CAPACITY_REQUESTS = 20 * (CHATS_PER_LONG + 1)
"""Requests from which the simulator's capacity is computed."""
PERCENTS = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """From and to how many tokens, both included."""

    chat: tuple[int, int]
    long: tuple[int, int]
    output: tuple[int, int]


@dataclass(slots=True, kw_only=True)
class Seen:
    """What clients have seen of one preset in one system."""

    chats_s: list[float] = field(default_factory=list[float])
    """Times to the first token of chats."""
    longs_s: list[float] = field(default_factory=list[float])
    """The same of long prompts."""
    gaps: DurationHistogram = field(default_factory=DurationHistogram)
    """Times between the tokens of an answer, of all requests."""
    num_tokens: int = 0
    seconds: float = 0.0
    """From the first arrival to the last token, over all rounds."""
    busy_s: float = 0.0
    """Time in which steps were computed."""

    def first(self, request: TraceRequest, lengths: Lengths, seconds: float) -> None:
        """Note the time to the first token of a request."""
        (self.longs_s if request.num_prompt >= lengths.long[0] else self.chats_s).append(seconds)


def mixed_trace(lengths: Lengths, *, seed: int, num_requests: int, gap_s: float) -> Trace:
    """Return chats in a Poisson stream in which every ninth request is a long prompt."""
    rng, now_s = random.Random(seed), 0.0
    requests: list[TraceRequest] = []
    for number in range(num_requests):
        is_long = number % (CHATS_PER_LONG + 1) == CHATS_PER_LONG // 2
        num_output = rng.randint(*lengths.output)
        num_prompt = rng.randint(*(lengths.long if is_long else lengths.chat))
        requests.append(
            TraceRequest(arrived_s=now_s, num_prompt=num_prompt, num_output=num_output, max_new_tokens=num_output)
        )
        now_s += rng.expovariate(1 / gap_s) if gap_s else 0.0
    return Trace(name=f"mixed {seed}", requests=tuple(requests), block_size=1)


class Watched:
    """A runner that keeps what it has computed."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.batches: list[Batch] = []
        self.close = runner.close

    def launch(self, batch: Batch) -> StepHandle:
        """Launch a step."""
        self.batches.append(batch)
        return self._runner.launch(batch)


class Served:
    """An engine of one preset, and what its clients have seen."""

    def __init__(self, config: EngineConfig) -> None:
        from pagewood.engine.build import build_engine

        self.inbox, self.outbox = MemoryInbox(), MemoryOutbox()
        self.engine: Engine = build_engine(config, inbox=self.inbox, outbox=self.outbox)
        self.watched = self.engine._runner = Watched(self.engine._runner)
        self.seen = Seen()

    def forget(self) -> None:
        """Begin to measure."""
        self.seen = Seen()
        self.watched.batches.clear()

    def slowness(self, model: StepModel) -> float:
        """Return the time in which it has computed, as a part of what its steps take by a model."""
        return self.seen.busy_s / sum(map(seconds_by(model), self.watched.batches))

    def run(self, trace: Trace, lengths: Lengths, *, seed: int) -> None:
        """Serve a trace, in real time."""
        rng = np.random.default_rng(seed)
        size, requests = self.engine.info.vocab_size, trace.requests
        prompts = [rng.integers(0, size, one.num_prompt, dtype=np.int32).tobytes() for one in requests]
        last_s: dict[str, float] = {}
        num_sent = num_ended = 0
        pending: Pending | None = None
        start_s = time.perf_counter()
        while num_ended < len(requests):
            now_s = time.perf_counter() - start_s
            while num_sent < len(requests) and requests[num_sent].arrived_s <= now_s:
                sampling = SamplingParams(max_tokens=requests[num_sent].num_output, temperature=0.0, ignore_eos=True)
                self.inbox.put(Submit(request_id=str(num_sent), tokens=prompts[num_sent], sampling=sampling))
                num_sent += 1
            if num_sent == num_ended and pending is None:
                time.sleep(requests[num_sent].arrived_s - now_s)
                continue
            pending = self.engine.advance(pending)
            now_s, before_s = time.perf_counter() - start_s, now_s
            self.seen.busy_s += now_s - before_s
            for delta in self.outbox.take():
                if delta.refusal is not None:
                    raise RuntimeError(f"request {delta.request_id}: {delta.refusal.message}")
                request = requests[int(delta.request_id)]
                if delta.request_id in last_s:
                    self.seen.gaps.add(now_s - last_s[delta.request_id])
                else:
                    self.seen.first(request, lengths, now_s - request.arrived_s)
                last_s[delta.request_id] = now_s
                self.seen.num_tokens += len(delta.tokens)
                num_ended += delta.finish is not None
        self.seen.seconds += max(last_s.values()) - requests[0].arrived_s
        while pending is not None:
            pending = self.engine.advance(pending)


def simulated(trace: Trace, lengths: Lengths, *, config: EngineConfig, model: StepModel, seen: Seen) -> None:
    """Add to `seen` what the simulator finds for a trace, with the limits of an engine's resolved configuration."""
    assert config.max_running is not None
    assert config.chunked_prefill_size is not None
    assert config.max_total_tokens is not None
    budget = budget_named(
        config.mixing,
        max_running=config.max_running,
        max_prefill_tokens=config.chunked_prefill_size,
        max_prefills=config.max_prefills,
        joint_prefill_tokens=config.joint_prefill_tokens,
    )
    page_size = config.page_size
    [observed] = simulate(
        replace(trace, block_size=page_size),
        Fleet(
            machine=Machine(name="this", source="step_model.py", model=model),
            num_pages=config.max_total_tokens // page_size,
            page_size=page_size,
        ),
        make_policies=lambda _: policies_named(f"{config.schedule_policy}+defer", page_size=page_size, budget=budget),
    )
    records = records_of([observed])
    for record in records:
        seen.first(trace.requests[record.arrival], lengths, record.first_token_after_s)
    seen.gaps.merge(observed.gaps)
    seen.num_tokens += sum(record.num_output for record in records)
    seen.seconds += max(record.finished_s for record in records) - records[0].arrived_s
    seen.busy_s += observed.busy_s


def table(title: str, rows: Iterable[tuple[str, Sequence[float], Sequence[float]]], names: Sequence[str]) -> str:
    """Return a table with columns for the engine, the simulator, and the quotient of both, for each name."""
    lines = [f"\n{title}\n", "| preset | " + " | ".join(f"{name}, engine | simulator | ratio" for name in names) + " |"]
    lines.append("|---|" + "--:|" * 3 * len(names))
    for preset, engine, simulator in rows:
        cells = [f"{a:,.1f} | {b:,.1f} | {a / b:.2f}" for a, b in zip(engine, simulator, strict=True)]
        lines.append(f"| {preset} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def print_tables(engines: dict[str, Seen], simulators: dict[str, Seen]) -> None:
    """Print a table for each kind of number."""

    def rows(measure: Callable[[Seen], Sequence[float]]) -> list[tuple[str, Sequence[float], Sequence[float]]]:
        return [(preset, measure(engines[preset]), measure(simulators[preset])) for preset in engines]

    def spread_ms(values: Sequence[float]) -> Sequence[float]:
        spread = spread_of(values)
        return [1e3 * value for value in (spread.p50, spread.p90, spread.p99)]

    names = [f"p{percent}" for percent in PERCENTS]
    some = next(iter(engines.values()))
    print(
        table(f"Time to the first token of {len(some.chats_s)} chats, ms:", rows(lambda s: spread_ms(s.chats_s)), names)
    )
    print(table(f"The same of {len(some.longs_s)} long prompts, ms:", rows(lambda s: spread_ms(s.longs_s)), names))
    print(
        table(
            "Time between two tokens of an answer, ms:",
            rows(lambda s: [1e3 * s.gaps.percentile(percent) for percent in PERCENTS]),
            names,
        )
    )
    throughput = rows(lambda seen: [seen.num_tokens / seen.seconds, 100 * seen.busy_s / seen.seconds])
    print(table("Throughput, and time in which steps are computed:", throughput, ["tokens/s", "busy, %"]))


def note(text: str) -> None:
    """Print progress."""
    print(text, file=sys.stderr, flush=True)


def compare(
    shape: ModelShape, steps: Shapes, lengths: Lengths, arguments: argparse.Namespace, *, seconds: float
) -> None:
    """Measure the presets in turn, and print the tables."""
    from end_to_end.model import write_model
    from step_model import measure

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_model(shape, folder, seed=0)
        samples = measure(folder, num_threads=arguments.threads, shapes=steps)
        model = StepModel.fitted(samples, relative=True)
        note(f"steps: {model}")
        config = EngineConfig(model=str(folder), num_threads=arguments.threads, max_total_tokens=POOL_TOKENS)
        served = {name: Served(replace(config, schedule_preset=name)) for name in arguments.preset or MIXINGS}
        configs = {name: one.engine.config for name, one in served.items()}
        whole = Seen()
        burst = mixed_trace(lengths, seed=-1, num_requests=CAPACITY_REQUESTS, gap_s=0.0)
        simulated(burst, lengths, config=next(iter(configs.values())), model=model, seen=whole)
        gap_s = whole.seconds / CAPACITY_REQUESTS / arguments.load
        num_requests = max(CHATS_PER_LONG + 1, round(seconds / gap_s))
        traces = [
            mixed_trace(lengths, seed=seed, num_requests=num_requests, gap_s=gap_s) for seed in range(arguments.rounds)
        ]
        note(f"{num_requests} requests a round, one every {gap_s:.2f} s, every ninth a long prompt")
        warm_up = mixed_trace(lengths, seed=-2, num_requests=CHATS_PER_LONG, gap_s=0.0)
        for one in served.values():
            one.run(warm_up, lengths, seed=arguments.rounds)
            one.forget()
        for number, trace in enumerate(traces):
            order = list(served)[number % len(served) :] + list(served)[: number % len(served)]
            for name in order:
                served[name].run(trace, lengths, seed=number)
                note(f"round {number}: {name}, {served[name].seen.seconds:.0f} s so far")
        for one in served.values():
            one.engine.close()
        samples += measure(folder, num_threads=arguments.threads, shapes=steps)
    model = StepModel.fitted(samples, relative=True)
    note(f"steps, before and after: {model}")
    found = {name: Seen() for name in served}
    factors = {name: one.slowness(model) for name, one in served.items()}
    for name, seen in found.items():
        slowed = StepModel(**{part: factors[name] * value for part, value in asdict(model).items()})
        for trace in traces:
            simulated(trace, lengths, config=configs[name], model=slowed, seen=seen)
    print(f"{num_requests} requests in each of {len(traces)} rounds, one every {gap_s:.2f} s on average; {lengths}")
    print_tables({name: one.seen for name, one in served.items()}, found)
    print("\nSteps of the engine:\n\n| preset | steps | time / time by the model |\n|---|--:|--:|")
    for name, one in served.items():
        print(f"| {name} | {len(one.watched.batches)} | {factors[name]:.2f} |")


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model; its numbers mean nothing")
    parser.add_argument("--preset", action="append", choices=MIXINGS, help="may be repeated (default: all)")
    parser.add_argument("--load", type=float, default=0.4, help="part of the simulator's capacity (default 0.4)")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of a round (default 60)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each preset (default 3)")
    parser.add_argument("--threads", type=int, default=2, help="compute threads (default 2)")
    arguments = parser.parse_args()
    if not 0 < arguments.load < 1:
        parser.error(f"--load must be in (0, 1), got {arguments.load}")
    if arguments.rounds < 1:
        parser.error(f"--rounds must be >= 1, got {arguments.rounds}")
    if not arguments.seconds > 0:
        parser.error(f"--seconds must be > 0, got {arguments.seconds}")
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # read when torch is imported

    from end_to_end.model import FULL, QUICK
    from step_model import Shapes

    if arguments.quick:
        steps = Shapes(chunks=(0, 32, 128), decodes=(0, 2), contexts=(32,), num_chunks=2, max_length=256, repeats=1)
        lengths = Lengths(chat=(16, 32), long=(300, 400), output=(4, 8))
        compare(QUICK, steps, lengths, arguments, seconds=min(arguments.seconds, 1.0))
    else:
        steps = Shapes(
            chunks=(0, 64, 128, 512), decodes=(0, 1, 4, 12), contexts=(192,), num_chunks=7, max_length=3584, repeats=1
        )
        lengths = Lengths(chat=(96, 160), long=(2000, 3900), output=(70, 130))
        compare(FULL, steps, lengths, arguments, seconds=arguments.seconds)


if __name__ == "__main__":
    main()
