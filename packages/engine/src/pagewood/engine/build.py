"""From a configuration to an engine on the device that it names."""

from __future__ import annotations

from pagewood.engine.api import EngineConfig, Inbox, Outbox
from pagewood.engine.build_cpu import Progress, build_cpu_engine
from pagewood.engine.build_cuda import build_cuda_engine
from pagewood.engine.core.loop import Engine


def build_engine(config: EngineConfig, *, inbox: Inbox, outbox: Outbox, progress: Progress | None = None) -> Engine:
    """Load a model and make an engine for it, on this machine's CPU or on its CUDA device.

    Args:
        config: what to build.
        inbox: where commands come from.
        outbox: where answers go.
        progress: called with what is being loaded or compiled.

    Raises:
        ValueError: the model is not supported, or does not fit the configured limits or the device.
        FileNotFoundError: the model's folder lacks a file.
    """
    config = config.resolved()
    build = build_cuda_engine if config.device == "cuda" else build_cpu_engine
    return build(config, inbox=inbox, outbox=outbox, progress=progress)
