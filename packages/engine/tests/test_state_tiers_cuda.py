"""Hybrid models over lower tiers on CUDA, with stand-ins: what comes back has the bits of what is computed alone."""

# pyright: basic
# It reads private parts of the engine, and torch is typed in part only.

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import sides
import speculating
from families.case import build
from families.changed import with_next_prediction
from families.registry import CASES
from pagewood.engine.api import EngineConfig, SamplingParams
from pagewood.engine.assembly.cuda import build as build_cuda
from pagewood.engine.assembly.tiers import lower_caches
from pagewood.engine.core.loop import Engine
from pagewood.engine.core.memory.states import StatePlaces
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.kvpool.memory import PageMemory
from pagewood.kvpool.tiers import StatePages
from pagewood.kvpool.tiers.pages.device import DevicePages
from pagewood.kvpool.tiers.torch_pages import QueuedCopies, StagedPages
from seeded_faults import Edit, assert_found
from sides import Side
from stand_ins import flashinfer_torch
from stand_ins.recording_device import RecordingDevice

pytestmark = pytest.mark.usefixtures("small_buffers", "patient_requests", "on_cuda", "gates_by_element")

PAGE, LENGTH, NUM_OUTPUT = 16, 70, 20
NUM_WHOLE = (LENGTH - 1) // PAGE * PAGE
SAMPLED = SamplingParams(temperature=0.6, seed=7, max_tokens=NUM_OUTPUT, ignore_eos=True)
SMALL: dict[str, Any] = {
    "max_total_tokens": 256, "max_running": 1, "state_places": 3, "host_cache_gb": 0.02,
}  # fmt: skip


class Stream:
    """A stream of a device that copies at once."""

    def queueing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def wait(self) -> None:
        """Do nothing."""


def staged_pages(memory: PageMemory) -> StagedPages:
    layers = [memory.blocks(layer) for layer in range(memory.layout.num_layers)]
    return StagedPages(layers, out=Stream(), into=Stream())


def queued_states(pages: DevicePages, states: PageMemory, *, num_parts: int) -> StatePages:
    layers = [states.blocks(layer) for layer in range(states.layout.num_layers)]
    return StatePages(pages, layers, num_parts=num_parts, copies=QueuedCopies(Stream(), Stream()))


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let engines run on recording devices, whose memory is copied as that of a GPU."""

    def made(config: EngineConfig, *, inbox: MemoryInbox, outbox: MemoryOutbox, **more: Any) -> Engine:
        config = replace(config, device="cuda", dtype="float32", num_threads=None, batch_invariant=True, **more)
        return build_cuda.build_on(RecordingDevice(), flashinfer_torch, config, inbox=inbox, outbox=outbox)

    monkeypatch.setattr(sides, "build_engine", made)
    monkeypatch.setattr(speculating, "build_engine", partial(made, page_size=4))  # which blocks depend on
    monkeypatch.setattr(build_cuda, "grammar_compiler", speculating.echo_compiler)
    monkeypatch.setattr(lower_caches, "device_pages", staged_pages)
    monkeypatch.setattr(lower_caches, "with_states", queued_states)
    with speculating.plain_engines():
        yield


@pytest.fixture(
    scope="module",
    params=[
        "qwen3-next",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("granite4-states", "lfm2", "falcon-h1")),
    ],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid") / request.param
    build(CASES[request.param], path)
    return path


def prompt(seed: int) -> list[int]:
    return [3 + (seed * 7919 + i * i * 31 + i) % 90 for i in range(LENGTH)]


def answered(folder: Path, *, num_turns: int = 1, **options: Any) -> list[tuple[list[int], int]]:
    """Return answers to prompts that do not fit beside each other, with their numbers of cached tokens."""
    side, found = Side(**{"model": str(folder), **SMALL, **options}), list[tuple[list[int], int]]()
    for name in [f"{turn} {seed}" for turn in range(num_turns) for seed in range(4)]:
        tokens = side.answer(name, prompt(int(name[-1])), SAMPLED)
        found.append((tokens, side.ends[name].num_cached_tokens))
    side.engine.close()
    return found


def check_tiers(folder: Path, disk: Path, **options: Any) -> None:
    """Check hits of the host, and after a restart of the disk."""
    whole = [tokens for tokens, _ in answered(folder, prefix_cache=False, host_cache_gb=None)]
    stored: dict[str, Any] = {"disk_cache_path": str(disk), "disk_cache_gb": 0.05, **options}
    first = answered(folder, num_turns=2, **stored)
    assert first == [*((tokens, 0) for tokens in whole), *((tokens, NUM_WHOLE) for tokens in whole)]
    assert answered(folder, **stored) == [(tokens, NUM_WHOLE) for tokens in whole]


def test_pages_and_states_come_back(folder: Path, tmp_path: Path) -> None:
    check_tiers(folder, tmp_path / "disk")


@pytest.fixture(scope="module")
def predicting(folder: Path) -> Path:
    """The model with a layer that drafts, if it has room for one; otherwise itself."""
    if not folder.name.startswith("qwen3-next"):
        return folder
    return with_next_prediction(folder, folder.parent / "predicting")


def check_traffic(folder: Path, seed: int) -> None:
    """Check random traffic with drafts, preemption and aborts, of which little fits on the device."""
    kind = "eagle" if folder.name == "predicting" else "ngram"
    report = speculating.run(
        speculating.mixed_load(seed, overlap=seed % 2 == 0), model=folder, drafter=speculating.Drafter(kind=kind),
        host_cache_gb=0.01, state_places=5,
    )  # fmt: skip
    assert report.num_preempted > 0
    assert report.num_cached_tokens > 0


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_drafts_and_tiers_together(predicting: Path, seed: int) -> None:
    check_traffic(predicting, seed)


@pytest.mark.slow
def test_prefixes_of_drafted_answers_come_back(predicting: Path, tmp_path: Path) -> None:
    kind = "eagle" if predicting.name == "predicting" else "ngram"
    check_tiers(predicting, tmp_path, speculative=kind)


FAULTS: dict[str, Edit] = {
    "a state is offered before it is computed": (
        StatePlaces, "offer", "min(request.num_computed, request.num_published * self._page_size)",
        "request.num_launched",
    ),
    "parts of another place": (StatePages, "_divided", "divmod(-1 - page,", "divmod(-1 - page + self.num_parts,"),
    "states do not come back": (
        QueuedCopies, "copy", "to.copy_(of, non_blocking=True)", "isinstance(target, torch.Tensor) or to.copy_(of)"
    ),
    "states are not taken along": (QueuedCopies, "copy", "to.copy_(of, non_blocking=True)", "pass"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_seeded_faults_are_found(fault: str, predicting: Path, tmp_path: Path) -> None:
    def run(seed: int) -> None:
        if seed:
            check_traffic(predicting, seed)
        else:
            check_tiers(predicting, tmp_path)

    assert_found([FAULTS[fault]], run, range(4))
