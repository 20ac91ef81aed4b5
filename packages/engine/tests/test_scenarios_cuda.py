"""The scenarios of the echo model, through the CUDA runner's staging, tables, graphs and copies."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import inspect
import random
import textwrap
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewood.engine.runner.cuda import graphs, pool, staging, step_arrays
from pagewood.engine.runner.cuda import runner as cuda
from pagewood.engine.runner.cuda.drafts import masks, verify, verify_arrays
from pagewood.kvpool.tiers import HostTier, TieredIndex
from pagewood.kvpool.tiers.torch_pages import device_pages
from pagewood.radixcache import RadixCache
from scale import scaled
from scenarios.drawing import random_scenario, with_drafts, with_pooling, with_windows
from scenarios.running import Report, run_scenario
from scenarios.scenario import VOCAB_SIZE, Scenario
from seeded_faults import assert_fails, by_turns
from stand_ins.echo_cuda import WatchedCUDARunner
from stand_ins.recording_device import RecordingDevice

pytestmark = [pytest.mark.usefixtures("small_buffers"), pytest.mark.slow]


def run(scenario: Scenario, device: RecordingDevice, *, with_graphs: bool, num_host_pages: int | None = None) -> Report:
    runner = WatchedCUDARunner(
        device,
        num_rows=scenario.config.num_rows,
        max_length=scenario.max_length,
        num_pages=scenario.num_pages * len(scenario.windows),
        windows=scenario.windows,
        page_size=scenario.config.page_size,
        vocab_size=VOCAB_SIZE,
        with_graphs=with_graphs,
        max_drafts=scenario.max_drafts,
        guess_quality=scenario.guess_quality,
    )
    device.waits.clear()

    def make_caches(_: object, page_size: int) -> Callable[[], TieredIndex]:
        assert num_host_pages is not None
        page_bytes = runner.memory.layout.bytes_per_page
        host = HostTier(page_bytes=page_bytes, num_pages=num_host_pages)
        return lambda: TieredIndex(
            RadixCache(page_size), device=device_pages(runner.memory), host=host, page_size=page_size
        )

    return run_scenario(
        scenario, make_runner=lambda _: runner, make_caches=None if num_host_pages is None else make_caches
    )


@settings(max_examples=scaled(20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rng=st.randoms(use_true_random=False), overlap=st.booleans(), with_graphs=st.booleans())
def test_output_equals_that_of_the_sequential_oracle(rng: random.Random, overlap: bool, with_graphs: bool) -> None:
    device = RecordingDevice()
    run(random_scenario(rng, overlap=overlap), device, with_graphs=with_graphs)
    assert set(device.waits) <= {"event.synchronize", "device.finish"}
    assert device.waits.count("device.finish") == 1  # by close


@settings(max_examples=scaled(20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rng=st.randoms(use_true_random=False), overlap=st.booleans(), with_graphs=st.booleans())
def test_drafts_do_not_change_the_output(rng: random.Random, overlap: bool, with_graphs: bool) -> None:
    device = RecordingDevice()
    run(with_drafts(random_scenario(rng, overlap=overlap), rng), device, with_graphs=with_graphs)
    assert set(device.waits) <= {"event.synchronize", "device.finish"}
    assert device.waits.count("device.finish") == 1  # by close


def scenario_with_windows(rng: random.Random, *, overlap: bool, has_drafts: bool) -> Scenario:
    scenario = random_scenario(rng, overlap=overlap)
    return with_windows(with_drafts(scenario, rng) if has_drafts else scenario, rng, has_whole=False)


@settings(max_examples=scaled(20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rng=st.randoms(use_true_random=False), overlap=st.booleans(), has_drafts=st.booleans(), with_graphs=st.booleans()
)
def test_windows_that_are_given_back_do_not_change_the_output(
    rng: random.Random, overlap: bool, has_drafts: bool, with_graphs: bool
) -> None:
    device = RecordingDevice()
    run(scenario_with_windows(rng, overlap=overlap, has_drafts=has_drafts), device, with_graphs=with_graphs)
    assert set(device.waits) <= {"event.synchronize", "device.finish"}
    assert device.waits.count("device.finish") == 1  # by close


FAULTS_OF_WINDOWS = {
    "page ids of a graph not renewed": (graphs, "copy_indices", "own[: len(indices)].copy_(indices)", "pass"),
    "tables of groups over each other": (
        step_arrays, "updates", "rows + rows // np.int32(tables.max_rows)", "rows % np.int32(tables.max_rows)"
    ),
    "pages in the window hidden": (cuda.CUDARunner, "_indices", "columns < behind", "columns <= behind"),
}  # fmt: skip


@settings(max_examples=scaled(10), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rng=st.randoms(use_true_random=False), overlap=st.booleans(), has_drafts=st.booleans())
def test_vectors_have_every_state_once(rng: random.Random, overlap: bool, has_drafts: bool) -> None:
    device, scenario = RecordingDevice(), with_pooling(random_scenario(rng, overlap=overlap), rng)
    run(with_drafts(scenario, rng) if has_drafts else scenario, device, with_graphs=True)
    assert set(device.waits) <= {"event.synchronize", "device.finish"}
    assert device.waits.count("device.finish") == 1  # by close


FAULTS_OF_VECTORS = {
    "states of other tokens": (step_arrays, "pooled_tokens", "+ offsets[grant] + first", "+ offsets[grant]"),
    "states of another grant": (pool, "queue_sums", "pooled[:, 2].tolist()", "pooled[::-1, 2].tolist()"),
    "sums read before they have come": (cuda.CUDAStepHandle, "wait", "done.synchronize()", "pass"),
}


@pytest.mark.parametrize("seed", range(24))
def test_output_over_tiers_equals_that_of_the_sequential_oracle(seed: int) -> None:
    rng = random.Random(seed)
    scenario = random_scenario(rng, overlap=seed % 4 > 0)
    scenario = replace(scenario, config=replace(scenario.config, prefix_cache=True))
    run(scenario, RecordingDevice(), with_graphs=seed % 3 > 0, num_host_pages=rng.randint(1, 40))


FAULTS = {
    "staging given back before its event": (
        cuda.CUDAStepHandle, "__init__", "self._slot = slot", "self._slot = slot; pool.give_back(slot)"
    ),
    "staging shared": (staging.StagingPool, "take", "self._free.pop()", "self._free[-1]"),
    "tokens read before they have come": (cuda.CUDAStepHandle, "wait", "done.synchronize()", "pass"),
    "tokens of the next step overwritten": (
        cuda.CUDARunner, "_sample", "step.targets.view(torch.int64)", "step.targets.view(torch.int64) - 1"
    ),
    "pages not updated": (cuda.CUDARunner, "_apply_updates", "if len(step.page_ids):", "if False:"),
    "padding reads a live row": (
        step_arrays, "step_arrays", "padding + tables.max_rows", "padding"
    ),
    "pages of the wrong row": (
        step_arrays, "step_arrays", "rows * np.int32(tables.pages_per_row) - pages", "rows * np.int32(1) - pages"
    ),
}  # fmt: skip
"""Owner of a function, its name, a piece of its source, and the replacement of that piece."""

FAULTS_OF_DRAFTS = {
    "start not lowered": (verify, "exact_places", "torch.minimum(step.starts, known - 1)", "step.starts"),
    "start of an exact row lowered": (verify, "exact_places", "step.is_inexact > 0", "step.is_inexact >= 0"),
    "later position seen": (masks, "packed_masks", "index_select(0, tokens) + 1", "index_select(0, tokens) + 2"),
    "own position hidden": (masks, "packed_masks", "index_select(0, tokens) + 1", "index_select(0, tokens)"),
    "second token of a byte lost": (masks.MaskShape, "of", "(shortest + 6) // shortest + 1", "1"),
    "one draft too many": (verify, "count_accepted", "accepted + 1", "accepted + 2"),
    "draft that was not granted accepted": (verify, "count_accepted", "equal *= steps < num_drafted[:, None]", "pass"),
    "drafts compared with themselves": (
        cuda.CUDARunner, "_accept", "self._tokens.index_select(0, places) == tokens", "tokens == tokens"
    ),
    "drafts written to the wrong place": (
        cuda.CUDARunner, "_draft", "step.draft_tokens", "(step.draft_tokens - 1)"
    ),
    "length of all promised tokens": (cuda.CUDARunner, "_accept", "counts.clamp(min=1)", "verify.width"),
    "row exact while its step is in flight": (
        verify.InexactRows, "settle", "self._latest == launch", "self._latest > 0"
    ),
    "padding written to a live page": (
        verify_arrays, "verify_step", "slot_offsets >= counts[slot_grants]", "slot_offsets < 0"
    ),
    "tokens cut at the wrong place": (verify.Yielded, "result", "places <", "places + 1 <"),
}  # fmt: skip


def seed_fault(fault: tuple[Any, str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace a function by what its edited source defines, wherever it was imported."""
    owner, name, old, new = fault
    function = inspect.getattr_static(owner, name)
    function = getattr(function, "__func__", function)
    source = textwrap.dedent(inspect.getsource(function))
    assert old in source, f"{name} has no {old!r}: update the fault"
    namespace: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + source.replace(old, new), function.__globals__, namespace)
    for place in (owner, cuda) if inspect.ismodule(owner) else (owner,):
        if name in vars(place):
            monkeypatch.setattr(place, name, namespace[name])


def run_seed(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    if kind == "windows":
        scenario = scenario_with_windows(rng, overlap=True, has_drafts=seed % 3 == 0)
    else:
        extensions = {"vectors": with_pooling, "drafts": with_drafts}
        scenario = random_scenario(rng, overlap=True)
        scenario = extensions[kind](scenario, rng) if kind in extensions else scenario
    run(scenario, RecordingDevice(), with_graphs=kind == "vectors" or seed % 2 > 0)


SEARCHES = {
    "plain": (FAULTS, 120), "drafts": (FAULTS_OF_DRAFTS, 200), "windows": (FAULTS_OF_WINDOWS, 100),
    "vectors": (FAULTS_OF_VECTORS, 100),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        pytest.param(kind, *one.values, marks=one.marks)
        for kind, (faults, _) in SEARCHES.items()
        for one in by_turns(faults)
    ],
)
def test_a_seeded_fault_is_found(kind: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faults, num_seeds = SEARCHES[kind]
    seed_fault(faults[fault], monkeypatch)
    assert_fails(partial(run_seed, kind), range(num_seeds))


def test_scenarios_with_drafts_exercise_what_they_claim() -> None:
    reports, device = [], RecordingDevice()
    for seed in range(40):
        rng = random.Random(seed)
        scenario = with_drafts(random_scenario(rng, overlap=True), rng)
        reports.append(run(scenario, device := RecordingDevice(), with_graphs=True))
    assert device.num_replayed > 0
    assert sum(report.num_accepted for report in reports) > 500
    assert sum(report.num_drafted - report.num_accepted for report in reports) > 500
    assert sum(report.num_launched_ahead for report in reports) > 500
