"""What each of several engines gets: cores, threads, files and addresses; and which configurations they can have."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from pagewood.engine.api import EngineConfig
from pagewood.engine.runner.ranks.cores import divided_cores
from pagewood.schedpolicy.routing.replicas import Role

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def num_cores() -> int:
    """Return the processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cuda_devices() -> tuple[str, ...]:
    """Return the CUDA devices that this process may use, as `CUDA_VISIBLE_DEVICES` names them."""
    chosen = os.environ.get(VISIBLE_DEVICES)
    if chosen is not None:
        return tuple(filter(None, map(str.strip, chosen.split(","))))
    return tuple(str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*")))


def check_fleet(
    config: EngineConfig,
    *,
    num_replicas: int,
    num_prefill: int = 0,
    num_cores: int,
    num_devices: int = 0,
) -> None:
    """Check that several engines can have a configuration.

    Args:
        config: of the server.
        num_replicas: engines, >= 1.
        num_prefill: those of them that only compute prompts.
        num_cores: processors.
        num_devices: CUDA devices.

    Raises:
        ValueError: a field stands against it.
    """
    if not 0 <= num_prefill < num_replicas:
        raise ValueError(f"prefill_replicas must be >= 0 and less than replicas ({num_replicas}), got {num_prefill}")
    if num_replicas == 1:
        return
    if num_prefill and config.remote_cache is None:
        raise ValueError(f"prefill_replicas must be 0 without remote_cache, where replicas share KV, got {num_prefill}")
    if config.device == "cuda" and num_devices < num_replicas * config.num_ranks:
        raise ValueError(
            f"replicas must leave each engine a CUDA device for each of its {config.num_ranks} ranks, "
            f"got {num_replicas} with {num_devices} devices"
        )
    if config.nnodes > 1:
        raise ValueError(f"nnodes must be 1 with replicas, got {config.nnodes}: engines are on one host")
    if config.role != "both":
        raise ValueError(f"role must be both with replicas, got {config.role!r}: see prefill_replicas")
    num_threads = config.num_threads or num_cores
    if num_threads < num_replicas * config.num_ranks:
        ranks = f" for each of its {config.num_ranks} ranks" if config.num_ranks > 1 else ""
        raise ValueError(
            f"replicas must leave each engine a thread{ranks}, got {num_replicas} with {num_threads} threads or cores"
        )


def role_of(number: int, *, num_prefill: int) -> Role:
    """Return the role of a replica: the first `num_prefill` ones compute the prompts of the others."""
    return Role.BOTH if not num_prefill else Role.PREFILL if number < num_prefill else Role.DECODE


def engine_of_each(config: EngineConfig, number: int, *, num_replicas: int, num_prefill: int = 0) -> EngineConfig:
    """Return the configuration of one of several engines, given its number. The router counts quotas, once for all.

    Each has a folder for its disk cache and a file for its decision log, and the whole size for both.

    Raises:
        ValueError: a field stands against its role.
    """
    disk, log = config.disk_cache_path, config.decision_log
    return replace(
        config,
        num_threads=None if config.num_threads is None else config.num_threads // num_replicas,
        quotas=(),
        role=role_of(number, num_prefill=num_prefill).value,
        disk_cache_path=None if disk is None else str(Path(disk) / f"replica-{number}"),
        decision_log=None if log is None else str(Path(log).with_stem(f"{Path(log).stem}-{number}")),
    )


def address_of_each(address: str, number: int) -> str:
    """Return the address of a replica: the port plus its number, or the path with the number behind it."""
    start, _, port = address.rpartition(":")
    if address.startswith("tcp://"):
        return address if port == "*" else f"{start}:{int(port) + number}"
    return f"{address}-{number}"


def devices_of_each(config: EngineConfig, num_replicas: int) -> list[tuple[str, ...]]:
    """Return the CUDA devices of each engine, one for each of its ranks; empty: it computes on a CPU."""
    if config.device != "cuda":
        return [()] * num_replicas
    names, size = cuda_devices(), config.num_ranks
    return [names[number * size : (number + 1) * size] for number in range(num_replicas)]


def cores_of_each(num_replicas: int) -> list[tuple[int, ...]]:
    """Return the processors of each engine; empty: all, because there are fewer than engines."""
    cores = [tuple(one) for one in divided_cores(num_replicas)]
    return cores if all(cores) else [() for _ in cores]
