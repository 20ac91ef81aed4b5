"""A program that is a node other than 0: `following_node.py CONFIG`, a configuration as JSON, until SIGTERM."""

from __future__ import annotations

import logging
import signal
import sys
import threading

import msgspec

from pagewood.engine.api import EngineConfig
from pagewood.engine.assembly.nodes import follow_node_0


def main(text: str) -> None:
    has_stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: has_stopped.set())
    logging.basicConfig(level="INFO", format="%(message)s")
    follow_node_0(msgspec.json.decode(text, type=EngineConfig), has_stopped=has_stopped.is_set)


if __name__ == "__main__":
    main(sys.argv[1])
