"""The record of one comparison, as JSON and as Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles

from end_to_end.cases import Case
from end_to_end.machine import Machine
from end_to_end.measure import MachineSamples, Pairs, Samples
from end_to_end.model import ModelShape
from end_to_end.roofline import Roofline, roofline

OURS = "pagewood"
STATIC, CONTINUOUS = "transformers, static batch", "transformers, continuous batching"

_LEGEND = """\
Roofline: every step takes the longer of its bytes / bandwidth and its arithmetic / matmul rate at its shapes; what
requests share is computed once and read once a step. Decode: from when all requests have their first token. Bandwidth:
share of what reading the weights and the KV once a step allows. Linears: share of the speed that the engine's
projections alone have, one after the other, with the weights from memory. Other answers: those that are not the tokens
of the static batch, and the largest distance between the two logits where such an answer first differs.
"""

_ELSEWHERE = """\
Published elsewhere for a model of this shape on another machine with two threads; **not measured in this run**, so not
comparable number by number: output tokens/s at concurrency 1 / 8 / 32: OpenVINO GenAI 35.5 / 167 / 274, llama.cpp f32
31.2 / 92 / 98, vLLM CPU 19.2 / 62 / 159, transformers static 24.6 / 80 / 160; shared 1,024 tokens at 8: OpenVINO 81,
vLLM 56.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One system in one case: medians over the repetitions, also as shares of the machine's median limits."""

    case: str
    system: str
    tokens_per_s: float
    best_tokens_per_s: float
    share_of_roofline: float
    first_token_s: float
    decode_tokens_per_s: float
    share_of_bandwidth: float
    """Speed of decode steps relative to a step that only reads the weights and the KV once."""
    share_of_linears: float
    """Speed of decode steps relative to a step of only the engine's projections."""
    num_answers: int
    num_differing: int
    largest_gap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A target and its measured value."""

    what: str
    wanted: float
    measured: float

    @property
    def met(self) -> bool:
        """Whether the target is met, compared with the digits that the table shows."""
        return round(self.measured, 2) >= self.wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One comparison on one machine."""

    made: str
    machine: Machine
    model: ModelShape
    num_parameters: int
    num_repeats: int
    cases: tuple[Case, ...]
    samples: tuple[Samples, ...]
    pairs: tuple[Pairs, ...]
    machine_samples: MachineSamples
    roofs: dict[str, Roofline]
    """By case, from the medians of the machine's measurements."""
    rows: tuple[Row, ...]
    targets: tuple[Target, ...]


def make_record(
    machine: Machine,
    model: ModelShape,
    cases: Sequence[Case],
    samples: Sequence[Samples],
    pairs: Sequence[Pairs],
    machine_samples: MachineSamples,
    *,
    num_parameters: int,
    num_repeats: int,
) -> Record:
    """Return a record that relates the samples to the limits of the machine."""
    rates = machine_samples.rates(median)
    roofs = {case.name: roofline(case, model, rates) for case in cases}
    by_name = {case.name: case for case in cases}
    rows = tuple(_row(one, by_name[one.case], roofs[one.case], machine_samples) for one in samples if one.tokens_per_s)
    return Record(
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        machine=machine,
        model=model,
        num_parameters=num_parameters,
        num_repeats=num_repeats,
        cases=tuple(cases),
        samples=tuple(samples),
        pairs=tuple(pairs),
        machine_samples=machine_samples,
        roofs=roofs,
        rows=rows,
        targets=tuple(_targets(cases, rows, pairs)),
    )


def write_record(record: Record, folder: Path) -> tuple[Path, Path]:
    """Write `record` as JSON and Markdown into `folder`, named by date and machine; return both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    machine = record.machine
    words = f"{record.made.removesuffix(' UTC')} {machine.processor} {machine.num_threads} threads"
    stem = re.sub(r"[^a-z0-9]+", "-", words.replace(":", "").lower()).strip("-")
    data, text = folder / f"{stem}.json", folder / f"{stem}.md"
    data.write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")
    text.write_text(markdown(record), encoding="utf-8")
    return data, text


def markdown(record: Record) -> str:
    """Return the record as a Markdown page."""
    machine, stream = record.machine, record.machine_samples.stream_bytes_per_s
    environment = ", ".join(f"{name}={value}" for name, value in machine.environment.items())
    read = sum(linear.num_weights for linear in (*record.model.linears(), record.model.head()))
    parts = [
        f"# End to end on {machine.processor}, {record.made}\n",
        f"{machine.num_cores} cores, {machine.num_threads} threads, {machine.memory_gb} GB, {machine.system}; "
        f"Python {machine.python}, torch {machine.torch}, transformers {machine.transformers}"
        + (f"; {environment}" if environment else "")
        + ".\n",
        f"Llama in float32 with random weights: {record.num_parameters / 1e6:.1f}M parameters, of which a decode step "
        f"reads {read / 1e6:.1f}M ({read * 4 / 1e6:.0f} MB). Greedy. Medians of {record.num_repeats} repetitions, in "
        "which the systems take turns.\n",
        f"Reading memory: {median(stream) / 1e9:.1f} GB/s in the median, {max(stream) / 1e9:.1f} at best.\n",
        "## Results\n",
        _result_table(record),
        *_errors(record),
        _LEGEND,
        "## Targets\n",
        _target_table(record),
        "## The overlapped loop beside the plain one\n",
        _pair_table(record),
        "## The machine at the model's shapes\n",
        _linear_table(record),
        "## Elsewhere\n",
        _ELSEWHERE,
    ]
    return "\n".join(parts)


def _row(samples: Samples, case: Case, roof: Roofline, machine: MachineSamples) -> Row:
    rate, decode = median(samples.tokens_per_s), median(samples.decode_tokens_per_s)
    linears_only = case.num_requests / machine.walk_s(case.num_requests, form="engine")
    return Row(
        case=samples.case,
        system=samples.system,
        tokens_per_s=rate,
        best_tokens_per_s=max(samples.tokens_per_s),
        share_of_roofline=rate / roof.tokens_per_s,
        first_token_s=median(samples.first_token_s),
        decode_tokens_per_s=decode,
        share_of_bandwidth=decode / roof.decode_bandwidth_tokens_per_s,
        share_of_linears=decode / linears_only,
        num_answers=samples.num_answers,
        num_differing=samples.num_differing,
        largest_gap=samples.largest_gap,
    )


def _targets(cases: Sequence[Case], rows: Sequence[Row], pairs: Sequence[Pairs]) -> list[Target]:
    table = {(row.case, row.system): row for row in rows}
    ratios = {one.case: ratios for one in pairs if (ratios := one.ratios())}
    targets: list[Target] = []
    for case in cases:
        ours = table.get((case.name, OURS))
        if ours is None:
            continue
        static, continuous = (table.get((case.name, name)) for name in (STATIC, CONTINUOUS))
        if case.num_shared and static:
            ratio = ours.tokens_per_s / static.tokens_per_s
            targets.append(Target(what=f"{case.name}: times transformers static batch", wanted=5.0, measured=ratio))
        elif case.num_requests == 1:
            share = ours.share_of_bandwidth
            targets.append(Target(what=f"{case.name}: share of the bandwidth bound", wanted=0.85, measured=share))
        elif case.num_requests >= 32:
            share = ours.share_of_roofline
            targets.append(Target(what=f"{case.name}: share of the roofline", wanted=0.8, measured=share))
            if continuous:
                ratio = ours.tokens_per_s / continuous.tokens_per_s
                what = f"{case.name}: times transformers continuous batching"
                targets.append(Target(what=what, wanted=3.0, measured=ratio))
        if case.name in ratios:
            ratio = median(ratios[case.name])
            targets.append(Target(what=f"{case.name}: overlapped, times plain loop", wanted=1.0, measured=ratio))
    return targets


def _result_table(record: Record) -> str:
    lines = [
        "| case | system | tokens/s | best | roofline | first token s | decode tokens/s | bandwidth | linears "
        "| other answers |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for case in record.cases:
        for row in (row for row in record.rows if row.case == case.name):
            other = f"{row.num_differing} of {row.num_answers}" if row.num_answers else "not compared"
            if row.num_differing:
                other += f", {row.largest_gap:.1e}"
            lines.append(
                f"| {row.case} | {row.system} | {row.tokens_per_s:.1f} | {row.best_tokens_per_s:.1f} "
                f"| {row.share_of_roofline:.0%} | {row.first_token_s:.3f} | {row.decode_tokens_per_s:.1f} "
                f"| {row.share_of_bandwidth:.0%} | {row.share_of_linears:.0%} | {other} |"
            )
        roof = record.roofs[case.name]
        lines.append(
            f"| {case.name} | *roofline* | {roof.tokens_per_s:.1f} | | 100% | {roof.prefill_s:.3f} "
            f"| {roof.decode_tokens_per_s:.1f} | {roof.decode_bytes_s / roof.decode_s:.0%} | | |"
        )
    return "\n".join(lines) + "\n"


def _errors(record: Record) -> list[str]:
    return [f"{one.case}, {one.system}: could not run: `{one.error}`\n" for one in record.samples if one.error]


def _target_table(record: Record) -> str:
    lines = ["| target | wanted | measured | met |", "|---|--:|--:|---|"]
    lines += [
        f"| {target.what} | {target.wanted:.2f} | {target.measured:.2f} | {'yes' if target.met else 'no'} |"
        for target in record.targets
    ]
    return "\n".join(lines) + "\n"


def _pair_table(record: Record) -> str:
    lines = [
        "Runs of both on one engine, one right after the other; medians of tokens per second, and of the ratios of the "
        "pairs.\n",
        "| case | pairs | overlapped | plain | ratio | middle half of the ratios | overlapped ahead |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for one in record.pairs:
        ratios = one.ratios()
        if len(ratios) < 2:
            continue
        low, middle, high = quantiles(ratios, n=4)
        lines.append(
            f"| {one.case} | {len(ratios)} | {median(one.overlapped):.1f} | {median(one.plain):.1f} | {middle:.3f} "
            f"| {low:.3f} to {high:.3f} | {sum(ratio > 1 for ratio in ratios)} |"
        )
    return "\n".join(lines) + "\n"


def _linear_table(record: Record) -> str:
    lines = [
        "Matmul rate in GFLOP/s with the weights in the cache where they fit, and milliseconds of one pass over all "
        "layers' weights from memory; the engine's linear / torch's; medians.\n",
        "| projection | rows | GFLOP/s | ms |",
        "|---|--:|--:|--:|",
    ]
    times = record.machine_samples.linears
    for name, num_rows in dict.fromkeys((time.shape, time.num_rows) for time in times):
        same = [time for time in times if (time.shape, time.num_rows) == (name, num_rows)]
        rates = " / ".join(f"{median(t.gflops[form] for t in same):.0f}" for form in ("engine", "torch"))
        walks = " / ".join(f"{median(t.walk_ms[form] for t in same):.2f}" for form in ("engine", "torch"))
        lines.append(f"| {name} | {num_rows} | {rates} | {walks} |")
    return "\n".join(lines) + "\n"
