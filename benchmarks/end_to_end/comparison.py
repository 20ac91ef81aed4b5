"""The comparison: a model, the systems that load it, and the cases that they run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from end_to_end import model
from end_to_end.cases import Case
from end_to_end.machine import Linears, Stream, describe_machine
from end_to_end.measure import measure
from end_to_end.pagewood_system import PagewoodSystem
from end_to_end.report import Record, make_record
from end_to_end.transformers_systems import ContinuousBatching, StaticBatch, load

_STREAM_BYTES, _QUICK_STREAM_BYTES = 1 << 29, 1 << 26


def compare(
    folder: Path, cases: Sequence[Case], *, quick: bool, tied: bool, num_threads: int, num_repeats: int, num_pairs: int
) -> Record:
    """Build the model in `folder` and run every system on every case; with `quick`, a tiny model."""
    shape = replace(model.QUICK if quick else model.FULL, tied=tied)
    num_parameters = model.write_model(shape, folder, seed=0)
    with ExitStack() as stack:
        static = StaticBatch(load(folder), num_threads=num_threads)
        ours = PagewoodSystem(folder, cases, num_threads=num_threads)
        systems = [ours, static, ContinuousBatching(load(folder), num_threads=num_threads)]
        for system in systems:
            stack.enter_context(closing(system))
        linears = Linears((*shape.linears(), shape.head()), num_threads=num_threads)
        stream = Stream(_QUICK_STREAM_BYTES if quick else _STREAM_BYTES, num_threads=num_threads)
        samples, pairs, machine_samples = measure(
            cases,
            systems,
            ours,
            static,
            linears,
            stream,
            vocab_size=shape.vocab_size,
            num_repeats=num_repeats,
            num_pairs=num_pairs,
        )
    return make_record(
        describe_machine(num_threads),
        shape,
        cases,
        samples,
        pairs,
        machine_samples,
        num_parameters=num_parameters,
        num_repeats=num_repeats,
    )
