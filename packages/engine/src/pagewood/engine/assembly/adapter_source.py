"""Reads the folders of adapters for a CPU engine, in a thread of its own."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from pagewood.engine.adapters.modules import ModelModules
from pagewood.engine.adapters.peft_folder import read_adapter
from pagewood.engine.api import Refusal
from pagewood.engine.core.memory.adapters import LoadedAdapter
from pagewood.engine.runner.cpu.program.adapters import CPUAdapters, PackedAdapter

_log = logging.getLogger(__name__)


class CPUAdapterSource:
    """Reads one folder after the other; satisfies `core.memory.adapters.AdapterSource`."""

    __slots__ = ("_adapters", "_model", "_reader")

    def __init__(self, adapters: CPUAdapters, model: ModelModules) -> None:
        """Read adapters for a model; `adapters` lays them out for its runner."""
        self._adapters = adapters
        self._model = model
        self._reader = ThreadPoolExecutor(1, "adapter-reader")

    def load(self, folder: str) -> Future[LoadedAdapter | Refusal]:
        """Begin to read a folder."""
        return self._reader.submit(self._read, folder)

    def keep(self, number: int, weights: object) -> None:
        """Let the runner find an adapter by its number."""
        assert isinstance(weights, PackedAdapter)
        self._adapters.keep(number, weights)

    def close(self) -> None:
        """Read no more folders."""
        self._reader.shutdown(cancel_futures=True)

    def _read(self, folder: str) -> LoadedAdapter | Refusal:
        try:
            weights = read_adapter(Path(folder), self._model, max_rank=self._adapters.max_rank)
            packed = self._adapters.pack(weights)
        except FileNotFoundError as error:
            return Refusal(message=str(error), code="adapter_missing")
        except (ValueError, OSError) as error:
            return Refusal(message=str(error), code="adapter_invalid")
        except MemoryError:
            return Refusal(message="there is no memory left for the adapter", code="adapter_too_large")
        _log.info("adapter %s: %d modules, %.1f MB", folder, len(weights.changes), packed.nbytes / 1e6)
        return LoadedAdapter(version=weights.version(), weights=packed, invocation=weights.invocation)
