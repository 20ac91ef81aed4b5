"""Engines for CUDA whose devices, and those of their other ranks, are stand-ins on the CPU."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asked_twice import PROMPTS, SMALL, outputs
from pagewood.engine.api import EngineConfig
from pagewood.engine.assembly.cuda import build as build_cuda
from pagewood.engine.assembly.cuda import rank as cuda_rank
from pagewood.engine.assembly.cuda.build import build_on
from pagewood.engine.assembly.tiers import lower_caches
from pagewood.engine.core.steps.speculation import SpeculationCounts
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.runner.ranks.group import Group
from pagewood.kvpool import memory as kv_memory
from pagewood.kvpool import scatter
from pagewood.kvpool.memory import PageMemory
from pagewood.kvpool.tiers.torch_pages import StagedPages
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


def pages_are_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let memory of KV be resized, as on a device; views of numpy, also those of tiers, would fix its size."""
    monkeypatch.setattr(kv_memory, "_zeros", lambda _, *shape: torch.zeros(*shape, dtype=torch.uint8))
    monkeypatch.setattr(scatter, "_movable", lambda array: array)
    stream: Any = SimpleNamespace(queueing=nullcontext, wait=lambda: None)

    def staged(memory: PageMemory) -> StagedPages:
        layers = [memory.blocks(layer) for layer in range(memory.layout.num_layers)]
        return StagedPages(layers, out=stream, into=stream)

    for module in (lower_caches, cuda_rank):
        monkeypatch.setattr(module, "device_pages", staged)


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
