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
from cuda_ranks import use_stand_ins
from families.case import build
from families.changed import with_next_prediction
from families.registry import CASES, deep
from group_in_threads import ranks_are_threads
from pagewood.engine.api import EngineConfig
from pagewood.engine.assembly.cuda import build as build_cuda
from pagewood.engine.assembly.cuda import rank as cuda_rank
from pagewood.engine.assembly.tiers import lower_caches
from pagewood.engine.core.loop import Engine
from pagewood.engine.core.memory.states import StatePlaces
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.runner.cuda.pages_of_ranks import FirstPart
from pagewood.engine.runner.ranks.ranked_pages import FollowedPages
from pagewood.kvpool.memory import PageMemory
from pagewood.kvpool.tiers import StatePages
from pagewood.kvpool.tiers.pages import states as pages_of_states
from pagewood.kvpool.tiers.pages.device import ChainedPages, DevicePages
from pagewood.kvpool.tiers.torch_pages import QueuedCopies, StagedPages
from seeded_faults import Edit, assert_found, seed_fault
from stand_ins import flashinfer_torch
from stand_ins.recording_device import RecordingDevice
from states_in_tiers import FORMS, check_tiers, check_traffic

pytestmark = pytest.mark.usefixtures("small_buffers", "patient_requests", "on_cuda", "gates_by_element")

ON_CUDA: dict[str, Any] = {"device": "cuda", "dtype": "float32", "batch_invariant": True}
FEW = {("qwen3-next", "both"), ("qwen3-next", "by request")}


class Stream:
    """A stream of a device that copies at once."""

    def queueing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def wait(self) -> None:
        """Do nothing."""


def staged_pages(memory: PageMemory) -> StagedPages:
    layers = [memory.blocks(layer) for layer in range(memory.layout.num_layers)]
    return StagedPages(layers, out=Stream(), into=Stream())


def queued_states(pages: DevicePages, states: PageMemory | None, *, num_parts: int | None = None) -> StatePages:
    layers = [] if states is None else [states.blocks(layer) for layer in range(states.layout.num_layers)]
    return StatePages(pages, layers, num_parts=num_parts, copies=QueuedCopies(Stream(), Stream()))


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let engines run on recording devices, whose memory is copied as that of a GPU."""

    def made(config: EngineConfig, *, inbox: MemoryInbox, outbox: MemoryOutbox, **more: Any) -> Engine:
        config = replace(config, **ON_CUDA, **more)
        return build_cuda.build_on(RecordingDevice(), flashinfer_torch, config, inbox=inbox, outbox=outbox)

    use_stand_ins(monkeypatch)
    ranks_are_threads(monkeypatch)
    monkeypatch.setattr(sides, "build_engine", made)
    monkeypatch.setattr(speculating, "build_engine", partial(made, page_size=4))  # which blocks depend on
    monkeypatch.setattr(build_cuda, "grammar_compiler", speculating.echo_compiler)
    for module in (lower_caches, cuda_rank):
        monkeypatch.setattr(module, "device_pages", staged_pages)
        monkeypatch.setattr(module, "with_states", queued_states)
    with speculating.plain_engines():
        yield


@pytest.fixture(
    scope="module",
    params=[
        "qwen3-next",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("granite4-states", "lfm2", "falcon-h1", "mamba2")),
    ],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid") / request.param
    build(CASES[request.param], path)
    return path


def test_pages_and_states_come_back(folder: Path, tmp_path: Path) -> None:
    check_tiers(folder, "alone", tmp_path / "disk", **ON_CUDA)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param(name, form, marks=() if (name, form) in FEW else pytest.mark.slow)
        for name in ("qwen3-next", "granite4-groups", "mamba2")
        for form in FORMS
    ],
)
def test_those_of_ranks_come_back(name: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has as many parts of a state as all, and copies its own ones, or whole states of its own requests."""
    if name == "mamba2":
        monkeypatch.setattr(pages_of_states, "_MOST_PARTS", 4)
    build(deep(name, FORMS[form][1]), tmp_path / "model")
    check_tiers(tmp_path / "model", form, tmp_path / "disk", **ON_CUDA)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("eagle", "both"), ("off", "both"), ("ngram", "ranks"), ("draft", "ranks"), ("eagle", "ranks"),
        ("ngram", "stages"), ("draft", "stages"), ("ngram", "hosts"), ("eagle", "hosts of stages of ranks"),
        ("draft", "a host has no state"), ("ngram", "by request"), ("draft", "by request"), ("eagle", "by request"),
        ("eagle", "by request on hosts"),
    ],
)  # fmt: skip
def test_more_than_fits_with_drafts_and_tiny_tiers(kind: str, form: str, tmp_path: Path) -> None:
    """On several devices."""
    check_traffic(kind, form, range(3 if kind == "ngram" else 2), tmp_path, **ON_CUDA)


@pytest.fixture(scope="module")
def predicting(folder: Path) -> Path:
    """The model with a layer that drafts, if it has room for one; otherwise itself."""
    if not folder.name.startswith("qwen3-next"):
        return folder
    return with_next_prediction(folder, folder.parent / "predicting")


def check_drafts(folder: Path, seed: int) -> None:
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
    check_drafts(predicting, seed)


@pytest.mark.slow
def test_prefixes_of_drafted_answers_come_back(predicting: Path, tmp_path: Path) -> None:
    kind = "eagle" if predicting.name == "predicting" else "ngram"
    check_tiers(predicting, "alone", tmp_path, **ON_CUDA, speculative=kind)


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
            check_drafts(predicting, seed)
        else:
            check_tiers(predicting, "alone", tmp_path, **ON_CUDA)

    assert_found([FAULTS[fault]], run, range(4))


_NO_STATES = (
    "self._own.{0}([one for one in message.pages if one >= 0], images, "
    "[slot for one, slot in zip(message.pages, slots) if one >= 0]{1})"
)
OF_RANKS: dict[str, tuple[str, Edit]] = {
    "the host lacks a rank's part of a state": (
        "ranks",
        (FollowedPages, "_moved", "self._own.read(message.pages, images, slots)", _NO_STATES.format("read", "")),
    ),
    "a stage's part of a state does not come back": (
        "stages",
        (FollowedPages, "_moved", "self._own.write(message.pages, images, slots, _ignore)",
         _NO_STATES.format("write", ", _ignore")),
    ),
    "a rank's part of a state of another prefix": (
        "both",
        (FollowedPages, "_moved", "read(message.pages",
         "read([one + (one < -self._own.num_parts) * self._own.num_parts for one in message.pages]"),
    ),
    "a part of a state of another rank": (
        "by request",
        (ChainedPages, "_divided", "number, own = divmod(-1 - page, self._num_parts)",
         "number, own = 0, (-1 - page) % self._num_parts"),
    ),
    "rank 0 copies no states": (
        "ranks",
        (FirstPart, "write", "self._own.write(pages, self._parts.of(memory, 0), slots, arrived)",
         "self._own._pages.write([one for one in pages if one >= 0], self._parts.of(memory, 0), "
         "[slot for one, slot in zip(pages, slots) if one >= 0], arrived); arrived(0)"),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", OF_RANKS)
def test_a_part_of_a_rank_that_is_wrong_is_noticed(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    form, edit = OF_RANKS[fault]
    seed_fault([edit], monkeypatch)
    build(deep("qwen3-next", FORMS[form][1]), tmp_path / "model")
    with pytest.raises(AssertionError, match="other answers"):
        check_tiers(tmp_path / "model", form, tmp_path / "disk", **ON_CUDA)
