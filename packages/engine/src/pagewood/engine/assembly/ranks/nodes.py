"""The nodes of a model that is computed on several hosts: how they meet, and what a node other than 0 does."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import msgspec

from pagewood.engine import __version__
from pagewood.engine.api import EngineConfig, Progress
from pagewood.engine.assembly.ranks.expert_options import expert_change
from pagewood.engine.model_folder.folder import find_drafter, model_folder
from pagewood.engine.model_folder.model_digest import ModelDigest
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.shard import Shard
from pagewood.engine.node_address import Address
from pagewood.engine.runner.ranks.cores import num_cores
from pagewood.engine.runner.ranks.group import Spawn, spawn
from pagewood.engine.runner.ranks.hosts.hosts import Hosts
from pagewood.engine.runner.ranks.hosts.identity import Identity
from pagewood.engine.runner.ranks.hosts.meeting import gather, join
from pagewood.engine.runner.ranks.hosts.node import NodeGroup
from pagewood.engine.runner.ranks.hosts.relay import compile_frames
from pagewood.engine.runner.ranks.hosts.secret import read_secret
from pagewood.engine.runner.ranks.pulse import HEARTBEAT_S

_log = logging.getLogger(__name__)

_OF_A_HOST = frozenset({
    "model", "num_threads", "node_rank", "master_addr", "node_secret_file", "insecure_no_node_secret", "expert_map",
    "speculative_model", "decision_log", "decision_log_mb", "decision_log_tokens", "disk_cache_path",
})  # fmt: skip
"""Fields of a configuration that may differ between hosts. What files hold is compared in other ways."""


def threads_of_node(config: EngineConfig) -> int:
    """Return the compute threads of all ranks of this host.

    Raises:
        ValueError: there are more ranks than cores.
    """
    num_threads, num_ranks = config.num_threads or num_cores(), config.ranks_per_node
    if num_threads < num_ranks:
        here = f", of which {num_ranks} are on this host" if config.nnodes > 1 else ""
        which = "tensor_parallel_size"
        if config.pipeline_parallel_size > 1:
            which += " times pipeline_parallel_size"
        raise ValueError(
            f"{which} must be at most the {num_threads} cores that this process may use, got {config.num_ranks}{here}"
        )
    return num_threads


def gathered(config: EngineConfig, digest: ModelDigest, progress: Progress | None) -> Hosts:
    """Wait for all other nodes, on node 0.

    Args:
        config: resolved.
        digest: of the model.
        progress: gets reports of what is awaited; an error that it raises ends the wait.

    Raises:
        ValueError: a file cannot be read.
        OSError: `master_addr` cannot be listened on.
    """
    compile_frames()
    identity = _identity(config, digest, progress)
    _log.info("node 0 of %d: waits for the others on %s", config.nnodes, config.master_addr)
    return Hosts(gather(identity, progress), config.ranks_per_node, heartbeat_s=HEARTBEAT_S)


def follow_node_0(config: EngineConfig, *, has_stopped: Callable[[], bool], spawn: Spawn = spawn) -> None:
    """Compute with the engine of node 0, and with the next one when that has ended, until this node is stopped.

    Args:
        config: of this node.
        has_stopped: whether it has been stopped; asked several times in a second.
        spawn: starts a rank.

    Raises:
        ValueError: the configuration or the model is wrong, or differs from that of node 0; node 0 has another secret.
        FileNotFoundError: the model's folder lacks a file.
    """
    config = config.resolved()
    if not config.node_rank:
        raise ValueError("node_rank must be at least 1 for a node that follows, got 0")
    folder = model_folder(config.model)
    first, num_in_stage = config.node_rank * config.ranks_per_node, config.tensor_parallel_size
    shard = Shard(first % num_in_stage, num_in_stage, by_request=config.enable_dp_attention)
    expert_change(config)(ModelConfig.from_folder(folder)).for_shard(shard)  # what cannot be divided is refused now
    if config.device != "cuda":
        config = replace(config, num_threads=threads_of_node(config))
    compile_frames()
    while not has_stopped():
        identity = _identity(config, ModelDigest(folder), None)  # files may have changed since the last group
        _log.info("node %d of %d: follows %s", config.node_rank, config.nnodes, config.master_addr)
        meeting = join(identity, has_stopped)
        if meeting is None:
            return
        _log.info("node %d: generation %d begins", config.node_rank, meeting.generation)
        group = NodeGroup(config, meeting, heartbeat_s=HEARTBEAT_S, spawn=spawn)
        try:
            reason = group.wait(has_stopped)
        finally:
            group.close()
        _log.warning("node %d: generation %d has ended: %s", config.node_rank, meeting.generation, reason)


def _identity(config: EngineConfig, digest: ModelDigest, progress: Progress | None) -> Identity:
    """Return what this node says of itself."""
    assert config.master_addr is not None
    secret = read_secret(config.node_secret_file)
    if progress is not None:
        progress("reading the model for its digest", 0, 1)
    digests = [_digest(digest, config.model)]
    if config.speculative != "off":
        folder = model_folder(config.model)
        found = find_drafter(folder, config.speculative, speculative_model=config.speculative_model)
        if found.folder is not None and found.folder != folder:
            digests.append(_digest(ModelDigest(found.folder), str(found.folder)))
    return Identity(
        node=config.node_rank,
        num_nodes=config.nnodes,
        address=Address.parsed(config.master_addr),
        secret=secret,
        version=f"{__version__} on {platform.machine()}",
        model=" ".join(digests),
        config={
            one.name: msgspec.json.encode(getattr(config, one.name)).decode()
            for one in fields(config)
            if one.name not in _OF_A_HOST
        },
    )


def _digest(digest: ModelDigest, name: str | Path | None) -> str:
    found = digest.wait()
    if found is None:
        raise ValueError(f"model must have files that do not change while it is loaded, got {name}")
    return found.hex()
