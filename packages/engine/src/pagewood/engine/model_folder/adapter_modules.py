"""The modules of a model that adapters may change."""

# pyright: basic
# torch's conversions to numpy have no types.

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from pagewood.engine.adapters.modules import ModelModules, Module, expert_stacks
from pagewood.engine.model_folder.load import adaptable_projections
from pagewood.engine.models.families.stored_layout import StoredLayout
from pagewood.engine.models.stored.checkpoint import Checkpoint
from pagewood.engine.models.stored.tensor_files import TensorFiles, stored_layout

Float32 = NDArray[np.float32]


def model_modules(folder: Path, files: Callable[[], TensorFiles | None] = lambda: None) -> ModelModules:
    """Return the modules of the whole model in `folder`, of which only headers are read.

    Their numbers are those of the latest `files`; None: of the folder.
    """
    modules = {
        name: Module(
            inputs=one.inputs, outputs=size, has_bias=one.has_bias, takes_tokens=one.takes_tokens, table=one.table
        )
        for one in adaptable_projections(folder)
        for name, size in one.parts
    }

    def numbers(name: str) -> Float32:
        module = modules[name]
        checkpoint = Checkpoint(folder, dtype=torch.float32, files=files())
        shape = (module.inputs, module.outputs) if module.takes_tokens else (module.outputs, module.inputs)
        return checkpoint.numbers(f"{module.table or name}.weight", *shape).numpy()

    def biases(name: str) -> Float32:
        checkpoint = Checkpoint(folder, dtype=torch.float32, files=files())
        return checkpoint.stack([(f"{name}.bias", modules[name].outputs)]).numpy()

    stored, num_heads = stored_layout(folder) or (StoredLayout(), 1)
    return ModelModules(
        modules=modules, stacks=expert_stacks(modules), stored=stored, num_heads=num_heads, numbers=numbers,
        biases=biases,
    )  # fmt: skip
