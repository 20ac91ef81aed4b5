"""Models with recurrent layers over lower tiers, on one device and on several, in more traffic than their memory holds.

Answers are those of one process, which computes alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from families.case import build
from families.changed import with_next_prediction
from families.registry import CASES, deep
from node_threads import following, free_port
from pagewood.engine.api import EngineConfig, SamplingParams
from pressed import Answer
from sides import Side
from speculating import Drafter, Report, mixed_load, random_drafting, run

PAGE, LENGTH, NUM_OUTPUT = 16, 70, 16
NUM_WHOLE = (LENGTH - 1) // PAGE * PAGE
SAMPLED = SamplingParams(temperature=1.0, seed=7, max_tokens=NUM_OUTPUT, ignore_eos=True, logprobs=0)
SMALL: dict[str, Any] = {
    "max_total_tokens": 256, "max_running": 1, "state_places": 3, "host_cache_gb": 0.02, "chunked_prefill_size": 32,
}  # fmt: skip
BY_REQUEST: dict[str, Any] = {
    "tensor_parallel_size": 2, "enable_dp_attention": True, "state_places": 6, "max_running": 2
}  # fmt: skip
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "alone": ({}, "rfrf"),
    "ranks": ({"tensor_parallel_size": 2}, "rfrf"),
    "stages": ({"pipeline_parallel_size": 2}, "rfrf"),
    "both": ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "rfrf"),
    "hosts": ({"tensor_parallel_size": 2, "nnodes": 2}, "rfrf"),
    "a host has most of a state": ({"pipeline_parallel_size": 2, "nnodes": 2}, "frrrrf"),
    "a host has no state": ({"pipeline_parallel_size": 2, "nnodes": 2}, "rfff"),
    "hosts of stages of ranks": ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "nnodes": 2}, "rfrf"),
    "by request": (BY_REQUEST, "rfrf"),
    "by request on hosts": ({**BY_REQUEST, "nnodes": 2}, "rfrf"),
}
"""Options, and the layers of the model."""


def options_of(form: str) -> dict[str, Any]:
    options = FORMS[form][0]
    num_ranks = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
    num_nodes = options.get("nnodes", 1)
    address = {"master_addr": f"127.0.0.1:{free_port()}"} if num_nodes > 1 else {}
    return {**options, **address, "num_threads": num_ranks // num_nodes}


def prompt(seed: int) -> list[int]:
    return [3 + (seed * 7919 + i * i * 31 + i) % 90 for i in range(LENGTH)]


def answered(folder: Path, *, num_turns: int = 1, **options: Any) -> list[Answer]:
    """Return the answers of an engine to prompts that do not fit beside each other.

    Two are asked at a time, so that each rank has one by request. Afterwards, everything is stored.
    """
    options = {"model": str(folder), **SMALL, **options}
    found: list[Answer] = []
    with following(EngineConfig(**options)) if "nnodes" in options else nullcontext([]) as errors:
        side = Side(**options)
        try:
            for turn, first in product(range(num_turns), (0, 2)):
                side.submit(f"{turn} {first}", prompt(first), SAMPLED)
                side.answer(f"{turn} {first + 1}", prompt(first + 1), SAMPLED)
                side.until(lambda: len(side.ends) % 2 == 0)
                names = [f"{turn} {first + one}" for one in range(2)]
                found += [
                    Answer(
                        tokens=tuple(side.tokens[name]),
                        logprobs=tuple(one.logprob for one in side.logprobs[name]),
                        num_cached=side.ends[name].num_cached_tokens,
                    )
                    for name in names
                ]
        finally:
            side.engine.close()
    assert not errors
    return found


def check_tiers(
    folder: Path, form: str, disk: Path, *, lose: Callable[[], object] | None = None, **options: Any
) -> None:
    """Check hits of the host, and after a restart of the disk.

    With `lose`, what is stored first is of no use; it is called before more is stored.
    """
    missed = answered(folder, prefix_cache=False, host_cache_gb=None, num_threads=1)
    hit = [replace(one, num_cached=NUM_WHOLE) for one in missed]
    stored: dict[str, Any] = {"disk_cache_path": str(disk), "disk_cache_gb": 0.05, **options}
    assert answered(folder, num_turns=2, **options_of(form), **stored) == [*missed, *hit], "other answers"
    if lose is not None:
        lose()
        assert answered(folder, **options_of(form), **stored) == missed, "other answers behind a loss"
    assert answered(folder, **options_of(form), **stored) == hit, "other answers behind a start"


def served(seed: int, kind: str, folder: Path, form: str, **options: Any) -> Report:
    """Serve more than fits, with drafts and tiny tiers; every answer must be that of plain decoding, alone."""
    rng, options = random.Random(seed), {**options_of(form), **options}
    drafter = Drafter(kind=kind, folder=folder.parent / "draft" if kind == "draft" else None)
    load = mixed_load(seed, overlap=seed % 2 > 0)
    if "tensor_parallel_size" in options:  # ranks add in another order than one process, so only tokens are the same
        arrivals = [
            replace(one, pooling=None, sampling=replace(one.sampling, logprobs=None, prompt_logprobs=None))
            for one in load.arrivals
        ]
        load = replace(load, arrivals=tuple(arrivals))
    places: int | None = rng.choice((5, 7, None))
    if "enable_dp_attention" in options:
        load, places = replace(load, num_pages=2 * load.num_pages), places and places + 1
    own: dict[str, Any] = {**options, "state_places": places, "max_running": load.config.max_running}
    return run(
        load, model=folder, drafter=None if kind == "off" else drafter, num_tokens=rng.choice((2, 3, 6)),
        make_drafting=random_drafting(rng), host_cache_gb=rng.choice((0.0003, 0.003)),
        **own,
    )  # fmt: skip


def check_traffic(kind: str, form: str, seeds: range, folder: Path, **options: Any) -> None:
    """Check that more than fits is served as `served` says: drafted, rejected, preempted, found again and aborted."""
    build(deep("qwen3-next", FORMS[form][1]), folder / "plain")
    build(CASES["llama"], folder / "draft")  # a draft model has no recurrent layers
    model = with_next_prediction(folder / "plain", folder / "model")
    reports = [served(seed, kind, model, form, **options) for seed in seeds]
    assert kind == "off" or sum(report.counts.num_drafted - report.counts.num_accepted for report in reports) > 0
    assert sum(report.num_preempted for report in reports) > 0
    assert sum(report.num_cached_tokens for report in reports) > 0
    assert all(report.num_aborted for report in reports)
