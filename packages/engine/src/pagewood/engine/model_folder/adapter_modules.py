"""The modules of a loaded model that adapters may change."""

# pyright: basic
# torch's conversions from and to numpy have no types.

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from pagewood.engine.adapters.modules import ModelModules, Module
from pagewood.engine.models.families.stored_layout import StoredLayout
from pagewood.engine.models.ops import Projection
from pagewood.engine.models.stored.checkpoint import Checkpoint
from pagewood.engine.models.stored.tensor_files import stored_layout

Float32 = NDArray[np.float32]


def model_modules(folder: Path, projections: Sequence[Projection]) -> ModelModules:
    """Return the modules of the model in `folder`, whose projections these are."""
    modules = {name: module for one in projections for name, module in _modules(one).items()}

    def numbers(name: str) -> Float32:
        module = modules[name]
        checkpoint = Checkpoint(folder, dtype=torch.float32)
        shape = (module.inputs, module.outputs) if module.takes_tokens else (module.outputs, module.inputs)
        return checkpoint.numbers(f"{module.table or name}.weight", *shape).numpy()

    stored, num_heads = stored_layout(folder) or (StoredLayout(), 1)
    return ModelModules(modules=modules, stored=stored, num_heads=num_heads, numbers=numbers)


def _modules(projection: Projection) -> dict[str, Module]:
    bias: Float32 | None = None
    if projection.bias is not None:
        own = projection.bias.float().numpy()
        bias = own.copy()
        if projection.order is not None:
            bias[projection.order] = own
    found: dict[str, Module] = {}
    start = 0
    for name, size in projection.parts:
        own_bias = None if bias is None else bias[start : start + size]
        found[name] = Module(
            inputs=projection.inputs,
            outputs=size,
            bias=own_bias,
            takes_tokens=projection.takes_tokens,
            table=projection.table,
        )
        start += size
    return found
