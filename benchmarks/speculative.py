"""Measures speculative decoding on this CPU against plain decoding, in one run, the systems in turn.

python benchmarks/speculative.py                      # prints the tables; about twenty minutes on two cores
python benchmarks/speculative.py --only tasks         # one part; may be repeated
python benchmarks/speculative.py --quick              # all parts but edits and control, within six minutes
python benchmarks/speculative.py --smoke              # few prompts, only to test the script
python benchmarks/speculative.py --hybrid --only forced --only cost   # with the hybrid of models.py, 531M parameters

tasks         the embedded model on its held-out tasks, greedy and sampled, at several numbers of concurrent requests
policy        each drafter against itself at rest, in one engine: what adaptive lengths gain or lose, to one percent
copying       the embedded model on tasks whose answers copy
rest          engines whose drafters never draft, on the embedded model's tasks
forced        edits of source files that a random model of 110M parameters is made to write
edits         what the lookup drafters accept when they follow recorded edits of source files
cost          what a step costs that verifies n drafts, with a random model of 110M parameters
control       adaptive and fixed lengths against rest, under bad and good drafts, with the same model
transformers  assisted generation of `transformers` beside ours, embedded model, one request at a time
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from pathlib import Path
from statistics import mean, median, stdev
from time import perf_counter
from typing import Any

from pagewood.engine.api import EngineConfig
from pagewood.engine.model_folder.folder import model_folder
from speculation.engines import Control, Run, System
from speculation.known import Answers, drafts_of
from speculation.prompts import recorded_edits, task_prompts

BATCHES = (1, 4, 16, 64)
DRAFTERS = ("ngram", "suffix", "draft", "eagle")
TEMPERATURE = 0.8
MAX_TOKENS = 128
PARTS = ("tasks", "rest", "policy", "copying", "forced", "edits", "cost", "control", "transformers")
QUICK_PARTS = ("tasks", "copying", "forced", "cost", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line."""

    num_threads: int
    num_repeats: int
    batches: tuple[int, ...]
    """Requests at a time, of tables with the embedded model."""
    quick: bool
    """Whether rounds are fewer and shorter; the numbers still count."""
    smoke: bool
    """Whether the numbers mean nothing."""
    is_hybrid: bool
    """Whether the random model has recurrent layers."""

    @property
    def model_name(self) -> str:
        """The random model, as text."""
        return "hybrid model" if self.is_hybrid else "110M model"

    def engine(self, **fields: Any) -> EngineConfig:
        """Return the configuration of an engine with room for the largest batch."""
        return EngineConfig(num_threads=self.num_threads, max_running=max(BATCHES), **fields)


def main() -> None:
    """Run the parts that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; may be repeated (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds, within six minutes")
    parser.add_argument("--smoke", action="store_true", help="few prompts; the numbers mean nothing")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--hybrid", action="store_true", help="the random model is the hybrid shape of models.py")
    parser.add_argument("--threads", type=int, default=min(2, cores), help="threads of every engine (default 2)")
    parser.add_argument("--repeat", type=int, default=5, help="rounds, each with every system (default 5)")
    parser.add_argument("--batch", type=int, action="append", help=f"requests at a time (default {BATCHES})")
    arguments = parser.parse_args()
    repeats = 1 if arguments.smoke else arguments.repeat
    options = Options(
        num_threads=arguments.threads,
        num_repeats=repeats,
        batches=tuple(arguments.batch or BATCHES),
        quick=arguments.quick,
        smoke=arguments.smoke,
        is_hybrid=arguments.hybrid,
    )
    parts: dict[str, Callable[[Options], None]] = {
        "tasks": tasks, "rest": rest, "policy": policy, "copying": copying, "forced": forced, "edits": edits,
        "cost": cost, "control": control, "transformers": transformers,
    }  # fmt: skip
    for name in arguments.only or (QUICK_PARTS if arguments.quick else PARTS):
        start = perf_counter()
        parts[name](options)
        print(f"\n({name}: {perf_counter() - start:.0f} s)", flush=True)


def tasks(options: Options) -> None:
    """Compare drafters on all tasks of the embedded model."""
    systems = [System(name, options.engine()) for name in ("plain", "plain again")]
    systems += [System(name, options.engine(speculative=name)) for name in DRAFTERS]
    for temperature in (0.0, TEMPERATURE):
        print(f"\n## Tasks of the embedded model, temperature {temperature}\n")
        _compare(systems, options, temperature=temperature)
    _close(systems)


def rest(options: Options) -> None:
    """Compare engines that have a drafter and never draft with plain ones: what is off should cost nothing."""
    systems = [System(name, options.engine()) for name in ("plain", "plain again")]
    systems += [System(name, options.engine(speculative=name), is_resting=True) for name in DRAFTERS]
    print("\n## Drafters that never draft, tasks of the embedded model, greedy\n")
    _compare(systems, options, temperature=0.0)
    _close(systems)


def policy(options: Options) -> None:
    """Compare the drafting of an engine with its rest, in pairs of short runs in random order.

    Two engines of one configuration differ by some percent, so only one engine can show less. The load is steady:
    there are four times as many requests as run at a time. Both runs of a pair have the same prompts, without a prefix
    cache, so their work and their texts are equal; but not with the suffix drafter, which would look the second run's
    answers up in the first.
    """
    print("\n## Adaptive lengths against rest in the same engine, tasks of the embedded model, greedy\n")
    print("| requests | drafter | drafting / rest | second half | standard error | pairs | accepted a token |")
    print("|---:|---|---:|---:|---:|---:|---:|")
    num_pairs = 2 if options.smoke else 40 * options.num_repeats
    for batch in options.batches:
        for name in DRAFTERS:
            system = System(name, options.engine(speculative=name, prefix_cache=False))
            order, ratios, num_accepted, num_tokens = random.Random(5), list[float](), 0, 0
            for pair in range(-4, num_pairs):  # the first four warm it up
                speeds: dict[bool, float] = {}
                for place, is_resting in enumerate(order.sample((False, True), 2)):
                    system.rest(is_resting)
                    prompts = task_prompts(4 * max(batch, 4), seed=2 * pair + 100 + place * (name == "suffix"))
                    run = system.run(prompts, concurrency=batch, max_tokens=MAX_TOKENS)
                    speeds[is_resting] = run.tokens_per_s
                    if not is_resting and pair >= 0:
                        num_accepted, num_tokens = num_accepted + run.num_accepted, num_tokens + run.num_tokens
                if pair >= 0:
                    ratios.append(log(speeds[False] / speeds[True]))
            ratio, error = _typical(ratios)
            settled, _ = _typical(ratios[len(ratios) // 2 :])
            print(
                f"| {batch} | {name} | {ratio:.3f} | {settled:.3f} | {error:.3f} | {len(ratios)} "
                f"| {num_accepted / num_tokens:.2f} |",
                flush=True,
            )
            system.close()


def _typical(logarithms: Sequence[float]) -> tuple[float, float]:
    """Return the mean of ratios and its standard error, without the tenths at both ends, which are interruptions."""
    cut = len(logarithms) // 10
    middle = sorted(logarithms)[cut : len(logarithms) - cut]
    return exp(mean(middle)), 1.2 * stdev(middle) / sqrt(len(middle)) if len(middle) > 1 else 0.0


def copying(options: Options) -> None:
    """Compare the lookup drafters on tasks whose answers copy."""
    systems = [System("plain", options.engine())]
    systems += [
        System(f"{name}, {size}", options.engine(speculative=name, speculative_num_tokens=size))
        for name in ("ngram", "suffix")
        for size in (4, 16)
    ]
    print("\n## Tasks whose answers copy, embedded model, greedy\n")
    _compare(systems, options, temperature=0.0, copying=True)
    _close(systems)


def forced(options: Options) -> None:
    """Let a random model write recorded edits, by a logits processor, with and without drafts, one request at a time.

    The text is forced; drafts, their verification and the steps are real. No prompt and no answer comes twice.
    """
    from speculation.forced import PROCESSORS, fields_of

    num_edits, num_lines = (1, 8) if options.smoke else (1, 30) if options.quick else (4, 40)
    num_rounds = 1 if options.smoke else 3 if options.quick else options.num_repeats
    print(f"\n## Edits of source files, {options.model_name}, one request; the text is forced by a logits processor\n")
    with _random_model(options) as folder:
        shared: dict[str, Any] = {"model": folder, "logits_processors": PROCESSORS, "prefix_cache": False}
        systems = [System(name, options.engine(**shared)) for name in ("plain", "plain again")]
        for name, size in (("ngram", 5), ("ngram", 16), ("suffix", 16)):
            drafting = options.engine(**shared, speculative=name, speculative_num_tokens=size)
            systems.append(System(f"{name}, {size}", drafting))
        rounds: list[list[Run]] = []
        for number in range(num_rounds):
            some = recorded_edits(num_edits, num_lines=num_lines, first=number * num_edits)
            runs = [
                system.run(
                    [one.prompt for one in some], concurrency=1, max_tokens=[len(one.answer) for one in some],
                    ignore_eos=True, each=fields_of(some),
                )
                for system in systems
            ]  # fmt: skip
            if any(run.outputs != tuple(one.answer for one in some) for run in runs):
                raise RuntimeError("a text is not the recorded one")
            rounds.append(runs)
        print("| system | tokens/s | relative to plain | tokens a step | accepted |\n|---|---:|---:|---:|---:|")
        for index, system in enumerate(systems):
            speed = median(runs[index].tokens_per_s for runs in rounds)
            ratios = [runs[index].tokens_per_s / runs[0].tokens_per_s for runs in rounds]
            length = sum(one[index].num_tokens for one in rounds) / sum(one[index].num_steps for one in rounds)
            drafted = sum(runs[index].num_drafted for runs in rounds)
            share = f"{sum(runs[index].num_accepted for runs in rounds) / drafted:.0%}" if drafted else "-"
            spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"| {system.name} | {speed:.0f} | {spread} | {length:.2f} | {share} |")
        _close(systems)


def edits(options: Options) -> None:
    """Print what lookup drafters accept on recorded edits."""
    from speculation.edits import accepted_lengths

    print("\n## Recorded edits: tokens for each step, if every draft is verified\n")
    print("| drafter | drafts | tokens a step | steps with a draft |\n|---|---:|---:|---:|")
    for name, size, length, share in accepted_lengths(num_edits=3 if options.smoke else 20):
        print(f"| {name} | {size} | {length:.2f} | {share:.0%} |")


def cost(options: Options) -> None:
    """Print what a step with drafts costs that are all rejected."""
    print(f"\n## Time of a step with drafts that are all rejected, relative to a plain step, {options.model_name}\n")
    sizes = (0, 7) if options.quick else (0, 1, 3, 7, 15)
    with _random_model(options) as folder:
        systems, answers = [System("plain", options.engine(model=folder))], Answers()
        for size in sizes[1:]:
            fixed = options.engine(
                model=folder, speculative="ngram", speculative_num_tokens=size, speculative_control="fixed"
            )
            with drafts_of(answers, accepted=0.0):
                systems.append(System(f"{size + 1} positions", fixed))
        print(
            "| requests | " + " | ".join(system.name for system in systems) + " |\n" + "|---:" * (1 + len(sizes)) + "|"
        )
        for batch in (1,) if options.quick or options.smoke else (1, 4):
            prompts = _random_prompts(batch)
            answers.know(systems[0], prompts, num_tokens=_num_output(options))
            rounds = [
                [_step_s(system, prompts, batch, options) for system in systems] for _ in range(options.num_repeats)
            ]
            shown = [f"{median(times) * 1e3:.1f} ms" for times in [[one[0] for one in rounds]]]
            shown += [f"{median(one[i] / one[0] for one in rounds):.2f}" for i in range(1, len(systems))]
            print(f"| {batch} | " + " | ".join(shown) + " |")
        _close(systems)


def control(options: Options) -> None:
    """Compare adaptive lengths with a fixed one and with rest in the same engine, with drafts of known quality."""
    print(f"\n## Adaptive and fixed lengths against rest in the same engine, {options.model_name}, known drafts\n")
    print("| requests | acceptance | rest, tokens/s | adaptive / rest | fixed / rest | adaptive / better | error |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    controls: tuple[Control, ...] = ("adaptive", "fixed", "never")
    with _random_model(options) as folder:
        plain, answers = System("plain", options.engine(model=folder)), Answers()
        answers.know(plain, _random_prompts(max(8, 3 * max(options.batches))), num_tokens=2 * _num_output(options))
        plain.close()
        for acceptance in (0.0, 0.3, 0.7):
            with drafts_of(answers, accepted=acceptance):
                system = System("adaptive", options.engine(model=folder, speculative="ngram"))
            for batch in (1, 4) if options.smoke else options.batches:
                # Requests come and go: if all began at once, the run would last as long as the one with fewest drafts.
                prompts = _random_prompts(batch if options.smoke else max(8, 3 * batch))
                limits = [random.Random(i).randint(1, 2 * _num_output(options)) for i in range(len(prompts))]
                rounds: list[dict[Control, float]] = []
                order = random.Random(batch)
                for index in range(-1, options.num_repeats):  # the first round fills the prefix cache
                    speeds: dict[Control, float] = {}
                    for one in order.sample(controls, len(controls)):
                        system.draft(one)
                        run = system.run(prompts, concurrency=batch, max_tokens=limits, ignore_eos=True)
                        speeds[one] = run.tokens_per_s
                    rounds += [speeds] if index >= 0 else []
                adaptive, fixed = (median(one[name] / one["never"] for one in rounds) for name in controls[:2])
                better: Control = "fixed" if fixed > 1 else "never"
                ratio, error = _typical([log(one["adaptive"] / one[better]) for one in rounds])
                speed = median(one["never"] for one in rounds)
                ratios = f"{adaptive:.2f} | {fixed:.2f} | {ratio:.3f} | {error:.3f}"
                print(f"| {batch} | {acceptance} | {speed:.0f} | {ratios} |", flush=True)
            system.close()


def transformers(options: Options) -> None:
    """Compare with the assisted generation of `transformers`."""
    from speculation.assisted import AssistedGeneration

    print("\n## Beside `transformers`, embedded model, greedy, one request at a time\n")
    prompts = task_prompts(8 if options.smoke else 20 if options.quick else 60, seed=1)
    ours = [System("plain", options.engine())]
    ours += [System(name, options.engine(speculative=name)) for name in ("ngram", "draft", "eagle")]
    theirs = [AssistedGeneration(name, num_threads=options.num_threads) for name in ("plain", "ngram", "draft")]
    rates: dict[str, list[float]] = {}
    for _ in range(options.num_repeats):
        for system in ours:
            run = system.run(prompts, concurrency=1, max_tokens=MAX_TOKENS)
            rates.setdefault(f"pagewood, {system.name}", []).append(run.tokens_per_s)
        for other in theirs:
            rates.setdefault(f"transformers, {other.name}", []).append(other.tokens_per_s(prompts, MAX_TOKENS))
    print("| system | tokens/s | spread |\n|---|---:|---:|")
    for name, values in rates.items():
        print(f"| {name} | {median(values):.0f} | {min(values):.0f} to {max(values):.0f} |")
    _close(ours)


def _compare(systems: Sequence[System], options: Options, *, temperature: float, copying: bool = False) -> None:
    """Print tokens per second of the first system, and those of the others relative to it, round by round.

    In brackets: the interval in which the median of the rounds lies with 95% probability, by resampling them.
    """
    names = [system.name for system in systems]
    print("| requests | plain, tokens/s | " + " | ".join(names[1:]) + " |\n" + "|---:" * (len(names) + 1) + "|")
    for batch in options.batches:
        rounds: list[list[Run]] = []
        for number in range(-1, options.num_repeats):  # the first round is not counted
            num_prompts = 8 if options.smoke else max(60, 2 * batch)
            prompts = task_prompts(num_prompts, seed=1000 * batch + number, copying=copying)
            turn = number % len(systems)  # another one begins in each round
            ran = {
                system.name: system.run(prompts, concurrency=batch, max_tokens=MAX_TOKENS, temperature=temperature)
                for system in [*systems[turn:], *systems[:turn]]
            }
            runs = [ran[system.name] for system in systems]
            for system, run in zip(systems, runs, strict=True):
                if run.outputs != runs[0].outputs:
                    raise RuntimeError(f"{system.name} has changed the text")
            rounds += [runs] if number >= 0 or options.smoke else []
        shown: list[str] = []
        for index in range(1, len(systems)):
            ratios = [runs[index].tokens_per_s / runs[0].tokens_per_s for runs in rounds]
            accepted = sum(runs[index].num_accepted for runs in rounds)
            drafted = sum(runs[index].num_drafted for runs in rounds)
            saved = sum(runs[0].num_steps for runs in rounds) / sum(runs[index].num_steps for runs in rounds)
            share = f"{accepted / drafted:.0%}" if drafted else "-"
            low, high = _interval(ratios)
            text = f"{median(ratios):.3f} ({low:.3f} to {high:.3f}); {share} accepted, 1/{saved:.1f} steps"
            if batch == 1:
                alone = [runs[index].decode_tokens_per_s / runs[0].decode_tokens_per_s for runs in rounds]
                text += f"; without prompts {median(alone):.2f}"
            shown.append(text)
        speed = median(runs[0].tokens_per_s for runs in rounds)
        print(f"| {batch} | {speed:.0f} | " + " | ".join(shown) + " |", flush=True)


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Return an interval that holds the median with 95% probability."""
    rng = random.Random(0)
    medians = sorted(median(rng.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[-51]


class _random_model:
    """A folder with random weights, of 110M parameters or of the hybrid shape, for a `with` statement."""

    def __init__(self, options: Options) -> None:
        self._is_small, self._is_hybrid = options.smoke, options.is_hybrid
        self._folder = tempfile.TemporaryDirectory()

    def __enter__(self) -> str:
        if self._is_hybrid:
            from models import SHAPES

            SHAPES["hybrid"].write(Path(self._folder.name), quick=self._is_small)
            shutil.copy(model_folder(None) / "tokenizer.json", self._folder.name)  # any: prompts are token ids
            return self._folder.name
        from end_to_end.model import FULL, QUICK, write_model

        write_model(QUICK if self._is_small else FULL, Path(self._folder.name), seed=0)
        return self._folder.name

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()


def _random_prompts(num_prompts: int) -> list[list[int]]:
    return [[(7 * i + 13 * j) % 900 + 1 for j in range(64)] for i in range(num_prompts)]


def _num_output(options: Options) -> int:
    return 8 if options.smoke else 24 if options.quick else 48


def _step_s(system: System, prompts: Sequence[Sequence[int]], batch: int, options: Options) -> float:
    run = system.run(prompts, concurrency=batch, max_tokens=_num_output(options), ignore_eos=True)
    return run.seconds / run.num_steps


def _close(systems: Sequence[System]) -> None:
    for system in systems:
        system.close()


if __name__ == "__main__":
    main()
