"""The memory of a model's matrices, which goes back to the system while the model sleeps.

Instructions have the addresses of matrices. So these stay where they are: what lies in new memory is written to a file
and read from there again, to the bit; what is mapped from a file is read from it by the system.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.cache_folder import sleep_folder
from pagewood.engine.runner.cpu.weights.packer import Packer
from pagewood.kvpool.system_pages import return_pages

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixMemory:
    """The memory of matrices. Invariant: nothing writes to it after the model was loaded, but `StoredMatrices`."""

    made: Sequence[Array] = ()
    """What lies in memory of this process."""
    mapped: Sequence[Array] = ()
    """What lies in files."""

    @classmethod
    def of(cls, packer: Packer) -> MatrixMemory:
        """Return the memory of what was packed so far."""
        return cls(made=packer.made, mapped=() if packer.mapped is packer.made else packer.mapped)

    def checksums(self) -> list[str]:
        """Return the digest of each matrix, in hexadecimal digits."""
        return [sha256(_bytes(array).data).hexdigest() for array in (*self.made, *self.mapped)]

    def give_back(self) -> None:
        """Give it to the system; what lies in no file is zeros then.

        Raises:
            OSError: the system is not Linux.
        """
        for array in (*self.made, *self.mapped):
            return_pages(array.ctypes.data, array.nbytes)


class StoredMatrices:
    """A file with what is in the memory of matrices; it is gone when this object is."""

    __slots__ = ("_arrays", "_file")

    def __init__(self, memories: Sequence[MatrixMemory]) -> None:
        """Write what lies in no file.

        Raises:
            OSError: it cannot be written.
        """
        self._arrays = [_bytes(array) for memory in memories for array in memory.made]
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=sleep_folder(), buffering=0)  # noqa: SIM115
        total = sum(len(array) for array in self._arrays)
        if total and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._file.fileno(), 0, total)
        for array in self._arrays:
            place = 0
            while place < len(array):
                place += os.write(self._file.fileno(), array[place:].data)

    def restore(self) -> None:
        """Read everything back to where it was.

        Raises:
            OSError: the file cannot be read.
        """
        at = 0
        for array in self._arrays:
            place = 0
            while place < len(array):
                count = os.preadv(self._file.fileno(), [array[place:].data], at + place)
                if not count:
                    raise OSError(f"the file of sleeping weights must have {at + len(array)} bytes, got {at + place}")
                place += count
            at += len(array)

    def close(self) -> None:
        """Remove the file."""
        self._file.close()


def _bytes(array: Array) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)
