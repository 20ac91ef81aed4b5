"""A group whose other ranks are threads of this process, built and driven as processes are."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import pytest
from msgspec.structs import replace

from pagewood.engine.assembly.cpu import build as build_cpu
from pagewood.engine.assembly.cuda import rank as cuda_rank
from pagewood.engine.assembly.rank_process import serve
from pagewood.engine.runner.ranks.group import Group, RankProcess
from pagewood.engine.runner.ranks.link import Link
from pagewood.engine.runner.ranks.messages import Begin, receive, send


class ThreadOfRank:
    """Satisfies `RankProcess`. Its rank ends when the group has ended."""

    pid = 0

    def __init__(self, connection: int, descriptors: Sequence[int]) -> None:
        self._link = Link(socket.socket(fileno=os.dup(connection)))
        self._descriptors = dict(zip(descriptors, map(os.dup, descriptors), strict=True))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else 0

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        return 0

    def kill(self) -> None:
        with suppress(OSError), socket.socket(fileno=os.dup(self._link.fileno())) as link:
            link.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        begin = receive(self._link)
        assert isinstance(begin, Begin)
        own = {"segment": self._descriptors[begin.segment]}
        if begin.kv_memory is not None:
            own["kv_memory"] = self._descriptors[begin.kv_memory]
        try:
            serve(replace(begin, **own), self._link, partial(send, self._link), leave=lambda: None)
        finally:
            self._link.close()
            for descriptor in self._descriptors.values():
                os.close(descriptor)


def ranks_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines start threads for their other ranks."""

    def start(label: str, connection: int, descriptors: Sequence[int]) -> RankProcess:
        del label
        return ThreadOfRank(connection, descriptors)

    for module in (build_cpu, cuda_rank):
        monkeypatch.setattr(module, "Group", partial(Group, spawn=start))
