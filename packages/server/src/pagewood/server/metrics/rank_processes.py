"""The processes that compute a model together with the engine process, found in Linux's /proc."""

from __future__ import annotations

from pathlib import Path

_PROC = Path("/proc")
_MODULE = "pagewood.engine.assembly.rank_process"


def rank_processes(engine: int | None) -> dict[str, int]:
    """Return name -> process id of the ranks that an engine process has started; nothing without /proc.

    Args:
        engine: its process id; None: there is none.
    """
    found: dict[str, int] = {}
    if engine is None:
        return found
    for task in _PROC.glob(f"{engine}/task/*/children"):
        try:
            for pid in task.read_text().split():
                words = (_PROC / pid / "cmdline").read_text().split("\0")
                if _MODULE in words:
                    found[f"rank-{words[words.index(_MODULE) + 1]}"] = int(pid)
        except OSError:  # it has ended
            continue
    return dict(sorted(found.items()))
