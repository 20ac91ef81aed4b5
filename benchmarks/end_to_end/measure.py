"""Runs all systems in turn, repeatedly, with measurements of the machine in between."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import sleep

from end_to_end.cases import Case, Prompts, draw_prompts
from end_to_end.machine import Linears, LinearTime, Stream
from end_to_end.pagewood_system import PagewoodSystem
from end_to_end.roofline import CHUNK, Rates
from end_to_end.run import Run, System
from end_to_end.transformers_systems import StaticBatch

_SETTLE_S = 0.3  # idle threads of the previous system spin for a while
_WARM_UP = Case(name="warm-up", num_requests=2, num_shared=0, num_own=8, num_output=4)


@dataclass(slots=True, kw_only=True)
class Samples:
    """The measurements of one system in one case, over the repetitions."""

    case: str
    system: str
    tokens_per_s: list[float] = field(default_factory=list[float])  # written by: measure
    first_token_s: list[float] = field(default_factory=list[float])  # written by: measure
    decode_tokens_per_s: list[float] = field(default_factory=list[float])  # written by: measure
    num_answers: int = 0  # written by: measure
    num_differing: int = 0
    """Number of answers that differ from those of `transformers`' static batch."""  # written by: measure
    largest_gap: float = 0.0
    """Largest gap of the two logits where an answer first differs; tiny if rounding decided."""  # written by: measure
    error: str | None = None
    """Why the system could not run."""  # written by: measure


@dataclass(slots=True, kw_only=True)
class MachineSamples:
    """The measurements of the machine, over the repetitions."""

    stream_bytes_per_s: list[float] = field(default_factory=list[float])  # written by: measure
    linears: list[LinearTime] = field(default_factory=list[LinearTime])  # written by: measure

    def rates(self, choose: Callable[[Iterable[float]], float]) -> Rates:
        """Return the median or the best (`max`) of the measurements."""
        flops: dict[tuple[str, int], list[float]] = {}
        for time in self.linears:
            flops.setdefault((time.shape, time.num_rows), []).append(1e9 * max(time.gflops.values()))
        return Rates(
            bytes_per_s=choose(self.stream_bytes_per_s),
            flops_per_s={key: choose(values) for key, values in flops.items()},
        )

    def walk_s(self, num_rows: int, *, form: str) -> float:
        """Return the seconds that all projections of a step take by themselves, from the medians."""
        by_shape: dict[str, list[float]] = {}
        for time in self.linears:
            if time.num_rows == num_rows:
                by_shape.setdefault(time.shape, []).append(time.walk_ms[form] / 1e3)
        return sum(map(median, by_shape.values()))


@dataclass(slots=True, kw_only=True)
class Pairs:
    """Output tokens per second of our two loops, in alternating runs on one engine.

    Both use the same memory, whose speed may depend on its place, and load on the machine slows both.
    """

    case: str
    overlapped: list[float] = field(default_factory=list[float])  # written by: measure
    plain: list[float] = field(default_factory=list[float])  # written by: measure

    def ratios(self) -> list[float]:
        """Return the speed of the overlapped loop relative to the plain one, for each pair."""
        return [one / other for one, other in zip(self.overlapped, self.plain, strict=True)]


def measure(
    cases: Sequence[Case],
    systems: Sequence[System],
    ours: PagewoodSystem,
    reference: StaticBatch,
    linears: Linears,
    stream: Stream,
    *,
    vocab_size: int,
    num_repeats: int,
    num_pairs: int,
) -> tuple[list[Samples], list[Pairs], MachineSamples]:
    """Run everything `num_repeats` times, with new prompts each time, so that no cache contains them.

    In every repetition, `num_pairs` further pairs of runs of each case compare the two loops of `ours`.
    """
    machine = MachineSamples()
    samples = {(c.name, s.name): Samples(case=c.name, system=s.name) for c in cases for s in systems}
    pairs = {case.name: Pairs(case=case.name) for case in cases}
    row_counts = sorted({case.num_requests for case in cases} | {CHUNK})
    for system in systems:
        _try(system, _WARM_UP, draw_prompts(_WARM_UP, vocab_size=vocab_size, seed=-1))
    for repeat in range(num_repeats):
        for num_rows in row_counts:
            machine.linears += linears.measure(num_rows)
        for case in cases:
            machine.stream_bytes_per_s += stream.measure()
            prompts = draw_prompts(case, vocab_size=vocab_size, seed=repeat)
            shift = repeat % len(systems)
            runs: dict[str, Run] = {}
            for system in (*systems[shift:], *systems[:shift]):
                print(f"  {repeat + 1}/{num_repeats} {case.name}: {system.name} ...", file=sys.stderr, flush=True)
                run = _try(system, case, prompts)
                if isinstance(run, Run):
                    runs[system.name] = run
                else:
                    samples[case.name, system.name].error = run
            for name, run in runs.items():
                _add(samples[case.name, name], run)
                if reference.name in runs:
                    _compare(samples[case.name, name], run, runs[reference.name], prompts, reference)
            print(f"  {repeat + 1}/{num_repeats} {case.name}: both loops ...", file=sys.stderr, flush=True)
            for seed in range(2 * num_pairs * repeat, 2 * num_pairs * (repeat + 1), 2):
                both = [draw_prompts(case, vocab_size=vocab_size, seed=num_repeats + seed + i) for i in range(2)]
                _run_pair(ours, case, both, pairs[case.name], plain_first=seed % 4 == 0)
    return list(samples.values()), list(pairs.values()), machine


def _run_pair(ours: PagewoodSystem, case: Case, prompts: Sequence[Prompts], pairs: Pairs, *, plain_first: bool) -> None:
    """Run both loops on different prompts, because they share a prefix cache."""
    loops = [(ours.run, pairs.overlapped), (ours.run_plain, pairs.plain)]
    for (run, rates), its_prompts in zip(reversed(loops) if plain_first else loops, prompts, strict=True):
        sleep(_SETTLE_S)
        rates.append(run(case, its_prompts).tokens_per_s)


def _try(system: System, case: Case, prompts: Prompts) -> Run | str:
    sleep(_SETTLE_S)
    try:
        return system.run(case, prompts)
    except Exception as error:  # a system that cannot run does not end the comparison; the report has the reason
        return f"{type(error).__name__}: {error}"


def _add(samples: Samples, run: Run) -> None:
    samples.tokens_per_s.append(run.tokens_per_s)
    samples.first_token_s.append(run.first_token_s)
    samples.decode_tokens_per_s.append(run.decode_tokens_per_s)


def _compare(samples: Samples, run: Run, expected: Run, prompts: Prompts, reference: StaticBatch) -> None:
    for prompt, tokens, others in zip(prompts, run.tokens, expected.tokens, strict=True):
        samples.num_answers += 1
        if tokens != others:
            samples.num_differing += 1
            samples.largest_gap = max(samples.largest_gap, reference.logit_gap(prompt, others, tokens))
