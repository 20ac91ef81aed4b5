"""`pagewood serve` on a host other than the first: it computes a part of the model, and serves nothing itself."""

from __future__ import annotations

import logging
import signal
import threading

from pagewood.engine.api import EngineConfig
from pagewood.server.observe.logs import announce
from pagewood.server.processes.child import register_dump

_log = logging.getLogger(__name__)
_FAILED = 1


def run_node(config: EngineConfig) -> int:
    """Follow the engine of node 0, one after the other, until a signal stops this node; return the exit code."""
    has_stopped = threading.Event()
    before = {
        number: signal.signal(number, lambda number, frame: has_stopped.set())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    register_dump()
    _log.info("node %d of %d has no HTTP: the server is on node 0", config.node_rank, config.nnodes)
    from pagewood.engine.assembly.ranks.nodes import follow_node_0  # takes seconds

    try:
        follow_node_0(config, has_stopped=has_stopped.is_set)
    except (ValueError, OSError) as error:
        announce(f"error: {error}")
        return _FAILED
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0
