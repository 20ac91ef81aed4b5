"""Build the engine that a configuration describes, on its device."""

from __future__ import annotations

from pagewood.engine.api import EngineConfig, Inbox, Outbox, Progress
from pagewood.engine.assembly.cpu.build import build_cpu_engine
from pagewood.engine.assembly.cuda.build import build_cuda_engine
from pagewood.engine.assembly.transformers.choice import reason_for_transformers
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
    if config.node_rank:
        raise ValueError(
            f"node_rank must be 0 for an engine, got {config.node_rank}: `pagewood serve` with it follows the engine"
        )
    if (reason := reason_for_transformers(config)) is not None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if (size := getattr(config, name)) > 1:
                raise ValueError(f"{name} must be 1 for a model that transformers computes ({reason}), got {size}")
        from pagewood.engine.assembly.transformers.build import build_transformers_engine  # imports transformers

        return build_transformers_engine(config, reason, inbox=inbox, outbox=outbox, progress=progress)
    build = build_cuda_engine if config.device == "cuda" else build_cpu_engine
    return build(config, inbox=inbox, outbox=outbox, progress=progress)
