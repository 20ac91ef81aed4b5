"""Tensors in memory as files of safetensors, which an engine maps: in shared memory where the system has it."""

# pyright: basic
# safetensors has no types.

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

_SHARED = Path("/dev/shm")
_FILE_BYTES = 256 << 20
"""Tensors are copied to memory before they are written, until there are this many bytes of them."""


class TensorFolder:
    """A new folder with tensors in files; it is gone after `close`."""

    __slots__ = ("_files", "_folder", "_held", "_names")

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(
            prefix="pagewood-", dir=_SHARED if os.access(_SHARED, os.W_OK) else None
        )
        self._files: list[str] = []  # contents written by: _put
        self._names: set[str] = set()  # contents written by: add
        self._held: dict[str, Tensor] = {}  # contents written by: add, _put

    def add(self, name: object, tensor: object) -> None:
        """Add a tensor, on any device; it may be overwritten afterwards. Wrong ones raise a TypeError or ValueError."""
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise TypeError(f"tensors must be pairs of a name and a tensor, got {name!r:.100} and {type(tensor)}")
        if name in self._names:
            raise ValueError(f"tensors must have each name once, got {name!r} again")
        self._names.add(name)
        self._held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        if sum(one.nbytes for one in self._held.values()) >= _FILE_BYTES:
            self._put()

    def files(self) -> tuple[str, ...]:
        """Return the paths of the files, after the last tensor; a ValueError is raised if there is none."""
        if self._held:
            self._put()
        if not self._files:
            raise ValueError("tensors must not be empty")
        return tuple(self._files)

    def close(self) -> None:
        """Remove the files."""
        self._folder.cleanup()

    def _put(self) -> None:
        path = Path(self._folder.name) / f"{len(self._files):05}.safetensors"
        save_file(self._held, path)
        self._files.append(str(path))
        self._held.clear()
