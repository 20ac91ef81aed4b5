"""Engines for CUDA whose devices, and those of their other ranks, are stand-ins on the CPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from asked_twice import PROMPTS, SMALL, outputs
from pagewood.engine.api import EngineConfig
from pagewood.engine.assembly.cuda import build as build_cuda
from pagewood.engine.assembly.cuda import rank as cuda_rank
from pagewood.engine.assembly.cuda.build import build_on
from pagewood.engine.core.steps.speculation import SpeculationCounts
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.runner.ranks.group import Group
from stand_ins import flashinfer_torch
from stand_ins.cuda_rank import spawn
from stand_ins.recording_device import RecordingDevice


def use_stand_ins(monkeypatch: pytest.MonkeyPatch, *, fault: str = "") -> None:
    """Let engines for CUDA use the stand-ins, and their other ranks, which are processes; see `cuda_rank.FAULTS`."""

    def opened() -> tuple[RecordingDevice, Any]:
        return RecordingDevice(), flashinfer_torch

    def compiled(needs: object, progress: object) -> None:
        del needs, progress

    monkeypatch.setattr(build_cuda, "open_cuda", opened)
    for name in ("compile_kernels", "compile_for"):
        monkeypatch.setattr(build_cuda, name, compiled)
    monkeypatch.setattr(cuda_rank, "Group", partial(Group, spawn=partial(spawn, fault=fault)))


def small(folder: Path, **options: Any) -> EngineConfig:
    """Return the configuration of a small engine, in float32, which FlashInfer itself would refuse."""
    whole: dict[str, Any] = {"model": str(folder), "device": "cuda", "dtype": "float32", **SMALL}
    return EngineConfig(**{**whole, **options})


def answered(
    config: EngineConfig, *, device: RecordingDevice | None = None, vocab_size: int | None = None
) -> list[list[int]]:
    """Return what an engine answers, twice; prompts have tokens below `vocab_size`."""
    return drafted(config, device=device, vocab_size=vocab_size)[0]


def drafted(
    config: EngineConfig, *, device: RecordingDevice | None = None, vocab_size: int | None = None
) -> tuple[list[list[int]], SpeculationCounts | None]:
    """Return that, and how many drafts there were."""
    prompts = [[token % (vocab_size or 1000) for token in prompt] for prompt in PROMPTS]
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    engine = build_on(device or RecordingDevice(), flashinfer_torch, config, inbox=inbox, outbox=outbox)
    return outputs(engine, inbox, outbox, prompts=prompts), engine.counters().speculation
