"""Tensors in memory as files of safetensors, which an engine maps: in shared memory where the system has it."""

# pyright: basic
# safetensors has no types.

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

_SHARED = Path("/dev/shm")
_FILE_BYTES = 256 << 20
"""Tensors are copied to memory before they are written, until there are this many bytes of them."""


@contextmanager
def written(tensors: Iterable[tuple[str, Tensor]]) -> Generator[tuple[str, ...]]:
    """Write tensors, one after the other, and give the paths of the files; they are removed at the end.

    Args:
        tensors: names and tensors, on any device; a tensor may be overwritten when the next one is asked for.

    Raises:
        TypeError: an item is not a name with a tensor.
        ValueError: there is no tensor, or a name comes twice.
    """
    with tempfile.TemporaryDirectory(prefix="pagewood-", dir=_SHARED if os.access(_SHARED, os.W_OK) else None) as name:
        folder, files, names = Path(name), list[str](), set[str]()
        held: dict[str, Tensor] = {}

        def put() -> None:
            path = folder / f"{len(files):05}.safetensors"
            save_file(held, path)
            files.append(str(path))
            held.clear()

        for key, tensor in tensors:
            if not isinstance(key, str) or not isinstance(tensor, Tensor):
                raise TypeError(f"tensors must be pairs of a name and a tensor, got {key!r:.100} and {type(tensor)}")
            if key in names:
                raise ValueError(f"tensors must have each name once, got {key!r} again")
            names.add(key)
            held[key] = tensor.detach().to("cpu", copy=True).contiguous()
            if sum(one.nbytes for one in held.values()) >= _FILE_BYTES:
                put()
        if held:
            put()
        if not files:
            raise ValueError("tensors must not be empty")
        yield tuple(files)
