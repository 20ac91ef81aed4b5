"""Settings of a server with several models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from pagewood.engine.weights.gguf.folder import is_gguf
from pagewood.server.config import ServeConfig

_OF_ONE_MODEL = {
    "adapters": "an adapter belongs to one model; admins load adapters with /v1/load_lora_adapter?model=NAME",
    "speculative_model": "a drafting model belongs to one model",
    "expert_map": "a map of experts belongs to one model",
    "disk_cache_path": "a disk cache has one owner",
    "decision_log": "a decision log has one owner",
}
"""Fields of `EngineConfig` that must be unset with several models, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """The models of a server, and how many of them are loaded.

    Raises:
        ValueError: a field is out of its range, or a setting does not go with several models.
    """

    models: tuple[ServeConfig, ...]
    """The settings of the server for each model; they differ in the model, its folder and its name only."""
    pinned: tuple[str, ...] = ()
    """Names of models that are loaded at the start, and stay."""
    max_loaded: int = 0
    """Most models that are loaded at a time; 0: as many as memory allows."""
    idle_s: float | None = None
    """A model that no request has used for this long is unloaded, seconds; None: only when memory is needed."""
    memory_gb: float | None = None
    """Memory for all loaded models, 1e9 bytes; None: what is available when the server starts."""
    loads_on_demand: bool = True
    """Whether a request loads its model; otherwise only admins do."""

    def __post_init__(self) -> None:
        names = [one.served_model_name for one in self.models]
        if not names:
            raise ValueError("models must hold at least one model, got none")
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(
                f"models must have different names, got {', '.join(twice)} twice: give --served-model-name"
            )
        for name in self.pinned:
            if name not in names:
                raise ValueError(f"pinned must hold names of models ({', '.join(names)}), got {name!r}")
        if self.max_loaded < 0:
            raise ValueError(f"max_loaded must be >= 0, got {self.max_loaded}")
        if self.max_loaded and len(set(self.pinned)) > self.max_loaded:
            raise ValueError(f"max_loaded must be at least the {len(set(self.pinned))} pinned, got {self.max_loaded}")
        for name in ("idle_s", "memory_gb"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be > 0, got {value}")
        _check(self.models[0], max_loaded=self.max_loaded)

    @property
    def names(self) -> Sequence[str]:
        """Names of all models."""
        return tuple(one.served_model_name for one in self.models)


DEFAULTS: Mapping[str, Any] = {one.name: one.default for one in fields(PoolConfig) if one.default is not MISSING}


def models_in(folder: Path) -> list[Path]:
    """Return the models of a folder: its folders with a configuration and a tokenizer, and its GGUF files.

    Raises:
        ValueError: it is no folder, or has none.
    """
    if not folder.is_dir():
        raise ValueError(f"models_dir must be a folder, got {str(folder)!r}")
    found = [
        path
        for path in sorted(folder.iterdir())
        if is_gguf(path) or all((path / name).is_file() for name in ("config.json", "tokenizer.json"))
    ]
    if not found:
        raise ValueError(f"models_dir must hold folders or GGUF files of models, got {str(folder)!r} with none")
    return found


def _check(config: ServeConfig, *, max_loaded: int) -> None:
    """Check that several models can have these settings.

    Raises:
        ValueError: a field stands against it.
    """
    engine = config.engine
    for name, why in _OF_ONE_MODEL.items():
        if getattr(engine, name):
            raise ValueError(f"{name} must not be given with several models, got {getattr(engine, name)!r}: {why}")
    if config.replicas > 1:
        raise ValueError(
            f"replicas must be 1 with several models, got {config.replicas}: the engines of a model would share cores "
            "with those of the others"
        )
    if engine.role != "both":
        raise ValueError(f"role must be both with several models, got {engine.role!r}: its partners have one model")
    if engine.nnodes > 1:
        raise ValueError(f"nnodes must be 1 with several models, got {engine.nnodes}: --master-addr has one owner")
    if config.kv_events is not None:
        raise ValueError(f"kv_events must not be given with several models, got {config.kv_events!r}: one owner")
    if config.otlp_endpoint is not None:
        raise ValueError("otlp_endpoint must not be given with several models: a trace has the name of one")
    if engine.device == "cuda" and max_loaded != 1:
        raise ValueError(
            f"max_loaded must be 1 with device cuda, got {max_loaded}: an engine takes --mem-fraction of its device"
        )
