"""The weights of a Hugging Face folder: safetensors only, one file or several, mapped into memory."""

# pyright: basic
# safetensors has no types.

from __future__ import annotations

import functools
import math
import mmap
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagewood.engine.api import Progress
from pagewood.engine.models.checkpoint_files import checkpoint_files

FLOATS = ("F32", "BF16", "F16", "F64")
"""As headers of safetensors name them. Numbers of 8 bits need scales, which are not supported."""
INTEGERS = ("I64", "I32")


class Checkpoint:
    """The named tensors of a folder. Invariant: `finish` succeeds only if every tensor has been read or checked."""

    __slots__ = (
        "_device",
        "_dtype",
        "_files",
        "_has_prefix",
        "_num_read",
        "_num_tensors",
        "_progress",
        "_unread",
        "folder",
        "num_elements",
    )

    def __init__(
        self,
        folder: str | Path,
        *,
        dtype: torch.dtype | None,
        device: torch.device | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Open the files of `folder`; tensors are converted to `dtype` on `device` (None: the CPU) as they are read.

        Without `dtype`, matrices keep theirs (or get one that holds all parts exactly), and vectors become float32.

        Raises:
            FileNotFoundError: there are no safetensors in it, or a file of its index is missing.
            ValueError: a file is damaged.
        """
        self.folder = Path(folder)
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._files = [_open(path) for path in checkpoint_files(self.folder)]  # written by: finish
        self._unread = {name: file for file in self._files for name in _names(file)}  # written by: check, finish
        self._has_prefix = any(name.startswith("model.") for name in self._unread)
        """Whether the decoder was saved as a part of a model with a head; otherwise its tensors lack the prefix."""
        self._num_tensors = len(self._unread)
        self._num_read = 0  # written by: stack, integers
        self.num_elements = 0  # written by: check
        """Total number of elements of the tensors that have been read or checked."""

    def check(
        self, parts: Sequence[tuple[str, int]], *columns: int, dtypes: Sequence[str] = FLOATS
    ) -> list[tuple[str, safe_open]]:
        """Take tensors off the list of unread ones and return their names and files; only the headers are read.

        Args:
            parts: name and number of rows of each.
            columns: the other dimensions.
            dtypes: the dtypes that are allowed, as headers of safetensors name them.

        Raises:
            ValueError: a tensor is missing, or has another shape or dtype.
        """
        files: list[tuple[str, safe_open]] = []
        for name, rows in parts:
            shape = (rows, *columns)
            name = name if self._has_prefix else name.removeprefix("model.")
            file = self._unread.pop(name, None)
            if file is None:
                raise ValueError(f"{self.folder} lacks the tensor {name} of shape {shape}")
            header = file.get_slice(name)
            if tuple(header.get_shape()) != shape:
                raise ValueError(f"{self.folder}: {name} must have shape {shape}, got {tuple(header.get_shape())}")
            if header.get_dtype() not in dtypes:
                kind = "floating point" if dtypes is FLOATS else "whole"
                raise ValueError(
                    f"{self.folder}: {name} must hold {kind} numbers ({', '.join(dtypes)}), got {header.get_dtype()}"
                )
            self.num_elements += math.prod(shape)
            files.append((name, file))
        return files

    def stack(self, parts: Sequence[tuple[str, int]], *columns: int) -> Tensor:
        """Return the named tensors, each `[rows, *columns]`, one below the other in one new tensor.

        Raises:
            ValueError: see `check`; nothing is allocated then.
        """
        files = self.check(parts, *columns)
        dtype = self._dtype
        if dtype is None and columns:
            tensors = [file.get_tensor(name) for name, file in files]  # mapped, not read
            if len(tensors) == 1:
                self._report()
                return tensors[0] if self._device is None else tensors[0].to(self._device)
            dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
            stacked = _passing(sum(rows for _, rows in parts), *columns, dtype=dtype).to(self._device or "cpu")
        else:
            shape = (sum(rows for _, rows in parts), *columns)
            stacked = torch.empty(shape, dtype=dtype or torch.float32, device=self._device)
        start = 0
        for (name, file), (_, rows) in zip(files, parts, strict=True):
            stacked[start : start + rows].copy_(file.get_tensor(name))
            start += rows
            self._report()
        return stacked

    def integers(self, name: str, rows: int) -> Tensor:
        """Return the tensor `name` `[rows]` as int64 on the CPU.

        Raises:
            ValueError: it is missing, or has another shape or no whole numbers.
        """
        [(_, file)] = self.check([(name, rows)], dtypes=INTEGERS)
        self._report()
        return file.get_tensor(name).to(torch.int64)

    def finish(self, *, ignored: Callable[[str], bool]) -> None:
        """Close the files.

        Raises:
            ValueError: they hold tensors that have neither been read nor checked and are not `ignored`.
        """
        left = sorted(name for name in self._unread if not ignored(name))
        if left:
            raise ValueError(f"{self.folder} holds {len(left)} unexpected tensors, the first is {left[0]}")
        self._unread.clear()
        self._files.clear()

    def _report(self) -> None:
        self._num_read += 1
        if self._progress:
            self._progress("reading weights", self._num_read, self._num_tensors)


def _passing(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor for a short time, in memory that goes back to the system at once; malloc would keep it."""
    return torch.frombuffer(mmap.mmap(-1, math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)


def _names(file: safe_open) -> list[str]:
    return list(file.keys())


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError) as error:  # a folder, an empty file
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
