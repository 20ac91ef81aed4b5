"""What each of several engines gets: cores and threads; and which configurations several engines can have."""

from __future__ import annotations

import os
from dataclasses import replace

from pagewood.engine.api import EngineConfig
from pagewood.engine.runner.ranks.cores import divided_cores

_UNSHARED = {
    "disk_cache_path": "a disk cache has one owner",
    "decision_log": "a decision log has one owner",
    "max_queue_s": "requests wait in the router, which has no such limit",
    "max_adapters": "a prefix that an adapter has computed is not known to the router",
    "schedule_weights": "shares of tenants are kept by the router, where they are equal",
}
"""Fields of `EngineConfig` that must be unset with several replicas, and why."""


def num_cores() -> int:
    """Return the processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_fleet(config: EngineConfig, *, num_replicas: int, num_cores: int) -> None:
    """Check that several engines can have a configuration.

    Raises:
        ValueError: a field stands against it.
    """
    if num_replicas == 1:
        return
    for name, why in _UNSHARED.items():
        if getattr(config, name):
            raise ValueError(f"{name} must not be given with replicas, got {getattr(config, name)!r}: {why}")
    if config.refuse_late:
        raise ValueError("refuse_late must be false with replicas: an engine does not know how long the router waits")
    if config.device == "cuda":
        raise ValueError("device must be cpu with replicas, got cuda: devices are not divided among replicas")
    if config.nnodes > 1:
        raise ValueError(f"nnodes must be 1 with replicas, got {config.nnodes}: engines are on one host")
    if config.role != "both":
        raise ValueError(f"role must be both with replicas, got {config.role!r}: all would have the same role")
    num_threads = config.num_threads or num_cores
    if num_threads < num_replicas * config.num_ranks:
        ranks = f" for each of its {config.num_ranks} ranks" if config.num_ranks > 1 else ""
        raise ValueError(
            f"replicas must leave each engine a thread{ranks}, got {num_replicas} with {num_threads} threads or cores"
        )


def engine_of_each(config: EngineConfig, *, num_replicas: int) -> EngineConfig:
    """Return the configuration of one of several engines. The router counts quotas, once for all."""
    num_threads = None if config.num_threads is None else config.num_threads // num_replicas
    return replace(config, num_threads=num_threads, quotas=())


def cores_of_each(num_replicas: int) -> list[tuple[int, ...]]:
    """Return the processors of each engine; empty: all, because there are fewer than engines."""
    cores = [tuple(one) for one in divided_cores(num_replicas)]
    return cores if all(cores) else [() for _ in cores]
