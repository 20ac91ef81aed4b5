"""Where a model is cut into stages."""

from __future__ import annotations

from pathlib import Path

from pagewood.engine.api import EngineConfig
from pagewood.engine.model_folder.load import layer_bytes
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.parts.choice import paged_part
from pagewood.engine.models.stage import divide


def stage_cuts(config: EngineConfig, folder: Path, model: ModelConfig, *, is_stored: bool) -> tuple[int, ...]:
    """Return where the model is cut into stages, so that they read about the same bytes; nothing if it is not.

    Args:
        config: of the engine.
        folder: of the model.
        model: its configuration.
        is_stored: whether weights keep the form in which they are stored; see `layer_bytes`.

    Raises:
        ValueError: it cannot be cut into that many.
    """
    count = config.pipeline_parallel_size
    if count == 1:
        return ()
    layers, head = layer_bytes(folder, model, is_stored=is_stored)
    have_pages = [paged_part(layer.mixer) is not None for layer in model.layers] if model.paged else None
    return divide(layers, count, model.cuts, head=head, have_pages=have_pages)
