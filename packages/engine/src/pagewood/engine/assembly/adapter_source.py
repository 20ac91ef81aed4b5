"""From a model to what reads folders of adapters for it, in each process of an engine in a thread of its own."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from pagewood.engine.adapters.low_rank import AdapterWeights
from pagewood.engine.adapters.modules import ModelModules
from pagewood.engine.adapters.peft_folder import read_adapter
from pagewood.engine.api import Refusal
from pagewood.engine.assembly.model_weights import ModelWeights
from pagewood.engine.core.adapter import LoadedAdapter
from pagewood.engine.core.memory.adapters import AdapterSource
from pagewood.engine.model_folder.adapter_modules import model_modules
from pagewood.engine.runner.ranks.ranked_adapters import RankedAdapters
from pagewood.engine.runner.ranks.ranked_weights import AnsweringGroup

_log = logging.getLogger(__name__)


class PackedAdapter(Protocol):
    """An adapter as a runner computes with it."""

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        ...


class RunnerAdapters(Protocol):
    """The adapters of a runner, on its device."""

    @property
    def max_rank(self) -> int:
        """The largest rank of an adapter in a module."""
        ...

    def pack(self, weights: AdapterWeights) -> PackedAdapter:
        """Lay an adapter out."""
        ...

    def keep(self, number: int, packed: Any) -> None:
        """Make an adapter known by its number, as long as it is referred to."""
        ...


def adapter_folders(adapters: RunnerAdapters, folder: Path, weights: ModelWeights) -> AdapterFolders:
    """Return what reads folders of adapters for the model in `folder` with its present weights."""
    return AdapterFolders(adapters, model_modules(folder, lambda: weights.files))


def adapter_source(
    adapters: RunnerAdapters | None, folder: Path, group: AnsweringGroup | None, weights: ModelWeights
) -> AdapterSource | None:
    """Return what reads adapters for an engine; None: it has none.

    Args:
        adapters: of the runner of this process.
        folder: of the model.
        group: all ranks; None: this process computes alone.
        weights: of this process.
    """
    if adapters is None:
        return None
    source = adapter_folders(adapters, folder, weights)
    return source if group is None else RankedAdapters(source, group)


class AdapterFolders:
    """Reads one folder after the other; satisfies `core.memory.adapters.AdapterSource`."""

    __slots__ = ("_adapters", "_model", "_reader")

    def __init__(self, adapters: RunnerAdapters, model: ModelModules) -> None:
        """Read adapters for a model; `adapters` lays out what changes the projections of its runner."""
        self._adapters = adapters
        self._model = model
        self._reader = ThreadPoolExecutor(1, "adapter-reader")

    def load(self, folder: str) -> Future[LoadedAdapter | Refusal]:
        """Begin to read a folder."""
        return self._reader.submit(self._read, folder)

    def keep(self, number: int, weights: object) -> None:
        """Let the runner find an adapter by its number."""
        self._adapters.keep(number, weights)

    def forget_unused(self) -> None:
        """Do nothing: what nothing refers to is gone."""

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
        except Exception as error:  # the engine goes on with the others
            _log.exception("adapter %s could not be read", folder)
            return Refusal(message=f"the adapter could not be read: {error!r}", code="adapter_invalid")
        _log.info("adapter %s: %d modules, %.1f MB", folder, len(weights.changes), packed.nbytes / 1e6)
        return LoadedAdapter(
            version=weights.version(), weights=packed, invocation=weights.invocation, is_bound=weights.is_bound
        )
