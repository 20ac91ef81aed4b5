"""A program that is a node other than 0: `following_node.py CONFIG`, a configuration as JSON, until SIGTERM.

Its ranks for CUDA are on stand-ins.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading

import msgspec

from pagewood.engine.api import EngineConfig
from pagewood.engine.assembly.ranks.nodes import follow_node_0
from pagewood.engine.runner.ranks.group import spawn
from stand_ins.cuda_rank import spawn as stand_in_spawn


def main(text: str) -> None:
    has_stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: has_stopped.set())
    logging.basicConfig(level="INFO", format="%(message)s")
    config = msgspec.json.decode(text, type=EngineConfig)
    start = stand_in_spawn if config.device == "cuda" else spawn
    follow_node_0(config, has_stopped=has_stopped.is_set, spawn=start)


if __name__ == "__main__":
    main(sys.argv[1])
