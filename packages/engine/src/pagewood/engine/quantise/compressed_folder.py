"""Writes a Hugging Face folder of safetensors, in several files if it is large, and config.json last of all."""

# pyright: basic
# safetensors is typed in part only.

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

_LARGEST_FILE = 4 << 30  # bytes of tensors
_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_OWN = ("config.json", "model.safetensors.index.json")


class CompressedFolder:
    """A folder that is being written. Invariant: until `finish` it has no config.json, so nothing loads it."""

    __slots__ = ("_files", "_pending", "_pending_bytes", "folder", "num_bytes")

    def __init__(self, folder: Path) -> None:
        """Make the folder.

        Raises:
            ValueError: there is something in it.
        """
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"OUT must be a new or empty folder, got {str(folder)!r}")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.num_bytes = 0  # written by: add
        """Bytes of all tensors so far."""
        self._pending: dict[str, Tensor] = {}  # written by: add, _save
        self._pending_bytes = 0  # written by: add, _save
        self._files: list[list[str]] = []  # written by: _save

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Store tensors; they are written when there are enough for a file."""
        for name, tensor in tensors.items():
            if self._pending and self._pending_bytes + tensor.nbytes > _LARGEST_FILE:
                self._save()
            self._pending[name] = tensor.contiguous()
            self._pending_bytes += tensor.nbytes
            self.num_bytes += tensor.nbytes

    def finish(self, source: Path, config: Mapping[str, Any]) -> None:
        """Write the remaining tensors, copy the other files of the folder `source`, and write config.json.

        Its subfolders are copied whole, since they hold no weights of this model; hidden files are not copied.
        """
        self._save()
        names = [f"model-{i + 1:05}-of-{len(self._files):05}.safetensors" for i in range(len(self._files))]
        if len(names) == 1:
            names = ["model.safetensors"]
        else:
            weight_map = {tensor: name for name, held in zip(names, self._files, strict=True) for tensor in held}
            index = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
            (self.folder / _OWN[1]).write_text(json.dumps(index, indent=2), encoding="utf-8")
        for number, name in enumerate(names):
            (self.folder / _part(number)).rename(self.folder / name)
        for path in sorted(source.iterdir()):
            if path.name[0] == "." or self._is_inside(path):
                continue
            if path.is_dir():
                shutil.copytree(path, self.folder / path.name)
            elif path.suffix not in _WEIGHTS and path.name not in _OWN:
                shutil.copyfile(path, self.folder / path.name)
        (self.folder / _OWN[0]).write_text(json.dumps(config, indent=2), encoding="utf-8")

    def _is_inside(self, path: Path) -> bool:
        """Whether this folder is `path` or lies in it."""
        return self.folder.resolve().is_relative_to(path.resolve())

    def _save(self) -> None:
        if self._pending or not self._files:
            save_file(self._pending, self.folder / _part(len(self._files)), metadata={"format": "pt"})
            self._files.append(list(self._pending))
            self._pending, self._pending_bytes = {}, 0


def _part(number: int) -> str:
    return f"part-{number}.safetensors"
