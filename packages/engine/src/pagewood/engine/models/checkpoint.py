"""The weights of a Hugging Face folder: safetensors only, one file or many, read where they lie."""

# pyright: basic
# safetensors has no types.

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagewood.engine.models.fields import Fields

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many of its parts are done, and how many there are."""


class Checkpoint:
    """The named tensors of a folder. Invariant: `finish` succeeds only if every tensor has been read."""

    __slots__ = ("_device", "_dtype", "_files", "_num_read", "_progress", "_unread", "folder")

    def __init__(
        self,
        folder: str | Path,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Open the files of `folder`; tensors are converted to `dtype` on `device` (None: the CPU) as they are read.

        Raises:
            FileNotFoundError: there are no safetensors in it, or a file of its index is missing.
            ValueError: a file is damaged.
        """
        self.folder = Path(folder)
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._files = [_open(path) for path in _paths(self.folder)]  # written by: finish
        self._unread = {name: file for file in self._files for name in _names(file)}  # written by: stack, finish
        self._num_read = 0  # written by: stack

    def stack(self, parts: Sequence[tuple[str, int]], *columns: int) -> Tensor:
        """Return the named tensors, each `[rows, *columns]`, one below the other in one new tensor.

        Raises:
            ValueError: one is missing or has another shape.
        """
        stacked = torch.empty((sum(rows for _, rows in parts), *columns), dtype=self._dtype, device=self._device)
        start = 0
        for name, rows in parts:
            stacked[start : start + rows].copy_(self._take(name, (rows, *columns)))
            start += rows
        return stacked

    def finish(self, *, ignored: Callable[[str], bool]) -> None:
        """Close the files.

        Raises:
            ValueError: they hold tensors that nobody read and that are not `ignored`.
        """
        left = sorted(name for name in self._unread if not ignored(name))
        if left:
            raise ValueError(f"{self.folder} holds {len(left)} unexpected tensors, the first is {left[0]}")
        self._unread.clear()
        self._files.clear()

    def _take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        file = self._unread.pop(name, None)
        if file is None:
            raise ValueError(f"{self.folder} lacks the tensor {name} of shape {shape}")
        tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{self.folder}: {name} must have shape {shape}, got {tuple(tensor.shape)}")
        if not tensor.is_floating_point():
            raise ValueError(f"{self.folder}: {name} must hold floating point numbers, got {tensor.dtype}")
        self._num_read += 1
        if self._progress:
            self._progress("reading weights", self._num_read, self._num_read + len(self._unread))
        return tensor


def _paths(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = Fields.from_file(index).section("weight_map") or Fields.from_file(index).empty("weight_map")
        return sorted({folder / weight_map.text(name) for name in weight_map.values})
    single = folder / "model.safetensors"
    if single.exists():
        return [single]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise FileNotFoundError(
            f"{folder} holds weights only as pickles, which can run code when they are read: "
            "convert them to model.safetensors"
        )
    raise FileNotFoundError(f"{folder} holds neither model.safetensors nor model.safetensors.index.json")


def _names(file: safe_open) -> list[str]:
    return list(file.keys())


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
