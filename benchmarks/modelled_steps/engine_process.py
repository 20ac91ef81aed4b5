"""The engine process of the server, around `modelled_engine`: `python -m modelled_steps.engine_process`."""

from __future__ import annotations

from modelled_steps.engine import modelled_engine
from pagewood.engine import build
from pagewood.server.processes.child import run_child
from pagewood.server.processes.engine_process import serve

if __name__ == "__main__":
    build.build_engine = modelled_engine
    run_child(serve)
