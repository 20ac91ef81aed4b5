"""The tensors of a tower in a checkpoint, widened to float32."""

# pyright: basic
# safetensors has no types.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagewood.engine.models.stored.tensor_files import TensorFiles
from pagewood.engine.weights.checkpoint_formats import FLOATS

_PROJECTOR = "multi_modal_projector."


class TowerWeights:
    """Reads tensors by the names that they have behind the tower's prefix.

    Args:
        files: of the checkpoint.
        prefixes: beginnings of the names, one of which the checkpoint has.

    Raises:
        ValueError: it has none of them.
    """

    __slots__ = ("_files", "_outside", "_prefix")

    def __init__(self, files: TensorFiles, prefixes: Sequence[str]) -> None:
        names = files.names()
        found = next((one for one in prefixes if any(name.startswith(one) for name in names)), None)
        if found is None:
            raise ValueError(
                f"the checkpoint must have a tower, whose names begin with {' or '.join(prefixes)}, got none"
            )
        self._files = files
        self._outside = "model." if found.startswith("model.") else ""
        inner = f"{found}vision_model."
        self._prefix = inner if any(name.startswith(inner) for name in names) else found

    def read(self, name: str, *shape: int) -> Tensor:
        """Return a tensor, float32.

        Raises:
            ValueError: it is missing, has another shape, or does not consist of plain numbers.
        """
        stored = self._outside + name if name.startswith(_PROJECTOR) else self._prefix + name
        if stored not in self._files.names():
            raise ValueError(f"{stored} is missing")
        own, dtype = self._files.header(stored)
        if own != shape or dtype not in FLOATS:
            raise ValueError(f"{stored} must be numbers of the shape {shape}, got {dtype} of the shape {own}")
        return self._files.read(stored).to(torch.float32, copy=True)
