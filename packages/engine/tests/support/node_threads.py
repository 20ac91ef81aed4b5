"""Nodes other than 0 as threads of this process, whose ranks are threads too."""

from __future__ import annotations

import socket
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from families.case import Case
from group_in_threads import ThreadOfRank
from pagewood.engine.api import EngineConfig
from pagewood.engine.assembly.ranks.nodes import follow_node_0
from pagewood.engine.runner.cpu.compiled.exchange import count_step, wait_for_all
from pagewood.engine.runner.cpu.compiled.hand_over import count, wait_for_count
from pagewood.engine.runner.ranks.group import RankProcess
from pagewood.engine.runner.ranks.hosts.relay import compile_frames

THREE_PARTS = Case(
    kind="Llama",
    extra={"hidden_size": 96, "intermediate_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3},
)
"""A tiny model that three ranks can divide."""


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def over_nodes(num_nodes: int, config: EngineConfig) -> EngineConfig:
    """Return the configuration of node 0 of several on this machine."""
    return replace(config, nnodes=num_nodes, master_addr=f"127.0.0.1:{free_port()}")


def start_rank(label: str, connection: int, descriptors: Sequence[int]) -> RankProcess:
    """Start a rank that is a thread; a `Spawn`."""
    del label
    return ThreadOfRank(connection, descriptors)


@contextmanager
def following(config: EngineConfig) -> Generator[list[BaseException]]:
    """Let the other nodes of a group follow node 0; yield what they raise.

    Args:
        config: of node 0.
    """
    compile_frames()  # kernels are compiled by one thread at a time
    for kernel in (count_step, wait_for_all, count, wait_for_count):
        kernel.compile()
    is_over = threading.Event()
    errors: list[BaseException] = []

    def follow(node: int) -> None:
        try:
            follow_node_0(replace(config, node_rank=node), has_stopped=is_over.is_set, spawn=start_rank)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=follow, args=(node,), daemon=True) for node in range(1, config.nnodes)]
    for thread in threads:
        thread.start()
    try:
        yield errors
    finally:
        is_over.set()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
