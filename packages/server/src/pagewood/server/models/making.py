"""The models of a server that has several, from its settings."""

from __future__ import annotations

import logging
from pathlib import Path

import zmq

from pagewood.engine.assembly.available_memory import available_memory_bytes
from pagewood.server.metrics.metrics import Metrics
from pagewood.server.metrics.requests import RequestMetrics
from pagewood.server.models.memory import estimated_bytes
from pagewood.server.models.pool import ModelPool
from pagewood.server.models.pool_config import PoolConfig
from pagewood.server.models.room import gb
from pagewood.server.models.served_model import ServedModel

_log = logging.getLogger(__name__)


def make_pool(config: PoolConfig, *, folder: Path, context: zmq.Context[zmq.Socket[bytes]]) -> ModelPool:
    """Return the models of a server, none of which is loaded.

    Raises:
        ValueError: a file of a model is wrong.
    """
    models: list[tuple[ServedModel, int]] = []
    for one in config.models:
        metrics = Metrics(requests=RequestMetrics(), compat=one.metrics_compat)
        try:
            model = ServedModel(one, metrics=metrics)
            model.template()
            models.append((model, estimated_bytes(one.engine, one.model_folder)))
        except (ValueError, OSError) as error:
            raise ValueError(f"the model {one.served_model_name} cannot be served: {error}") from error
    memory_bytes = available_memory_bytes() if config.memory_gb is None else round(config.memory_gb * 1e9)
    _log.info(
        "%s for models; they need %s", gb(memory_bytes), ", ".join(f"{one.name} {gb(num)}" for one, num in models)
    )
    return ModelPool(
        models,
        folder=folder,
        context=context,
        memory_bytes=memory_bytes,
        pinned=config.pinned,
        max_loaded=config.max_loaded,
        idle_s=config.idle_s,
        loads_on_demand=config.loads_on_demand,
    )
