"""Build the engine that a configuration describes, on its device."""

from __future__ import annotations

from pagewood.engine.api import EngineConfig, Inbox, Outbox, Progress
from pagewood.engine.assembly.build_cpu import build_cpu_engine
from pagewood.engine.assembly.build_cuda import build_cuda_engine
from pagewood.engine.core.loop import Engine


def build_engine(config: EngineConfig, *, inbox: Inbox, outbox: Outbox, progress: Progress | None = None) -> Engine:
    """Load a model and build an engine for it, on the CPU or on the CUDA device of this machine.

    Args:
        config: what to build.
        inbox: source of commands.
        outbox: destination of answers.
        progress: gets reports of what is being loaded or compiled.

    Raises:
        ValueError: the model is not supported, or does not fit the configured limits or the device.
        FileNotFoundError: the model's folder lacks a file.
    """
    config = config.resolved()
    build = build_cuda_engine if config.device == "cuda" else build_cpu_engine
    return build(config, inbox=inbox, outbox=outbox, progress=progress)
