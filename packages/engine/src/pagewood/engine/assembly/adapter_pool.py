"""From a configuration to the adapters of an engine."""

from __future__ import annotations

from pathlib import Path

from pagewood.engine.api import EngineConfig, LoadAdapter
from pagewood.engine.assembly.adapter_source import AdapterFolders, RunnerAdapters
from pagewood.engine.assembly.model_weights import ModelWeights
from pagewood.engine.core.memory.adapters import AdapterPool
from pagewood.engine.model_folder.adapter_modules import model_modules
from pagewood.engine.runner.ranks.ranked_adapters import RankedAdapters
from pagewood.engine.runner.ranks.ranked_weights import AnsweringGroup
from pagewood.schedpolicy import SlotShares


def adapter_folders(adapters: RunnerAdapters, folder: Path, weights: ModelWeights | None) -> AdapterFolders:
    """Return what reads folders of adapters for the model in `folder` with its present weights."""
    return AdapterFolders(adapters, model_modules(folder, lambda: None if weights is None else weights.files))


def adapter_pool(
    config: EngineConfig,
    adapters: RunnerAdapters,
    folder: Path,
    group: AnsweringGroup | None,
    weights: ModelWeights | None,
) -> AdapterPool:
    """Return the adapters of an engine, after those that it has from the start were loaded.

    Args:
        config: of the engine.
        adapters: of the runner of this process.
        folder: of the model.
        group: all ranks; None: this process computes alone.
        weights: of this process; None: they stay those of the folder.

    Raises:
        ValueError: one of these cannot be loaded.
    """
    source = adapter_folders(adapters, folder, weights)
    pool = AdapterPool(
        config.max_adapters,
        source=source if group is None else RankedAdapters(source, group),
        sharing=SlotShares(config.max_adapters, max_passes=config.num_rows),
    )
    for name, own in config.adapters:
        refusal = pool.load(LoadAdapter(request_id="", name=name, folder=own))
        if refusal is not None:
            pool.close()
            raise ValueError(f"adapter {name} cannot be loaded: {refusal.message}")
    return pool
