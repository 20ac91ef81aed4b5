"""The device under test, the results that a check can have, and what the checks share."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from pagewood.engine import LLM
from pagewood.engine.api import EngineConfig
from pagewood.engine.assembly.cuda import build as build_cuda
from pagewood.engine.assembly.cuda import rank as cuda_rank
from pagewood.engine.assembly.cuda.build import open_cuda
from pagewood.engine.runner.cuda.device import Device
from pagewood.engine.runner.cuda.kernels.flashinfer_api import FlashInfer
from pagewood.engine.runner.ranks.group import Group
from stand_ins import flashinfer_torch
from stand_ins.cuda_rank import spawn
from stand_ins.recording_device import RecordingDevice

TOLERANCE = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 3e-2}
"""Largest allowed difference, relative to the largest magnitude of a result or to 1, whichever is larger."""
_SMALL_CHUNK = 64
QUESTIONS = ("What is 12 + 7?", "Reverse: stone", "What is 9 times 8?", "What is the capital of France?")


class Failed(Exception):
    """A check failed."""


class Skipped(Exception):
    """A check cannot be done here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A device and the library that computes on it."""

    device: Device
    flashinfer: FlashInfer
    is_gpu: bool
    is_slow: bool = False
    """Whether the GPU is emulated."""

    @property
    def where(self) -> torch.device:
        """The torch device of the tensors."""
        return self.device.torch_device

    def config(self, **options: Any) -> EngineConfig:
        """Return the configuration of a small engine, in float16."""
        small = {"device": "cuda", "dtype": "float16", "max_running": 6, "max_total_tokens": 4096}
        if self.is_slow:
            small["chunked_prefill_size"] = _SMALL_CHUNK  # every start computes a step of the largest size
        return EngineConfig(**{**small, **options})

    @contextmanager
    def llm(self, **options: Any) -> Iterator[LLM]:
        """Return an LLM on the device; stand-ins take the places of devices and of FlashInfer's compiler."""
        with patch.object(build_cuda, "open_cuda", lambda: (self.device, self.flashinfer)):
            compiler = build_cuda.compile_kernels if self.is_gpu else lambda needs, progress: None
            group = Group if self.is_gpu else partial(Group, spawn=spawn)
            with patch.object(build_cuda, "compile_kernels", compiler), patch.object(cuda_rank, "Group", group):
                config = asdict(self.config(**options))
                with LLM(**{name: value for name, value in config.items() if value is not None}) as llm:
                    yield llm


def open_host(*, stand_in: bool, is_slow: bool = False) -> Host:
    """Return the GPU and FlashInfer, or their stand-ins on the CPU.

    Raises:
        ValueError: no GPU or no FlashInfer was found.
    """
    if stand_in:
        return Host(device=RecordingDevice(), flashinfer=flashinfer_torch, is_gpu=False)
    device, flashinfer = open_cuda()
    return Host(device=device, flashinfer=flashinfer, is_gpu=True, is_slow=is_slow)


def difference(mine: torch.Tensor, theirs: torch.Tensor, dtype: str) -> str | None:
    """Return how two results differ by more than the tolerance of their dtype, or None if they agree."""
    limit = TOLERANCE[dtype] * max(1.0, float(theirs.abs().max()))
    worst = float((mine.cpu().float() - theirs.cpu().float()).abs().max())
    return None if worst <= limit else f"differs by {worst:.3g}, more than {limit:.3g}"


def prompts() -> list[np.ndarray[Any, Any]]:
    """Return the questions as token ids of the demo model's chat template."""
    from pagewood.engine.model_folder.folder import model_folder
    from pagewood.engine.text import Tokenizer

    tokenizer = Tokenizer.from_folder(model_folder(None))
    return [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
