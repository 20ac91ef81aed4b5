"""Memory of tensors on a device that goes back to it while an engine sleeps, and numbers that are replaced in place.

A tensor keeps its shape and its views when the storage behind it has no memory for a while; only its address changes,
so what was captured with it must be captured again.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from hashlib import sha256
from types import FunctionType, MethodType, ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_WITHOUT_TENSORS = (
    str, bytes, int, float, complex, type(None), type, range, slice, Enum, ModuleType, np.ndarray, np.generic,
    torch.dtype, torch.device,
)  # fmt: skip


def tensors_of(root: object, *, outside: Collection[object] = ()) -> list[Tensor]:
    """Return all tensors that an object is made of, each once; those of an equal one are in the same order.

    Nothing of the objects `outside` is wanted.
    """
    found: list[Tensor] = []
    seen: dict[int, object] = {id(one): one for one in outside}

    def visit(one: object) -> None:
        if isinstance(one, _WITHOUT_TENSORS) or id(one) in seen:
            return
        seen[id(one)] = one
        if isinstance(one, Tensor):
            found.append(one)
            return
        for part in _parts(one):
            visit(part)

    visit(root)
    return found


def _parts(one: object) -> Iterable[object]:
    match one:
        case Mapping():
            return list(one.values())
        case list() | tuple():
            return one
        case partial():
            return (one.func, *one.args, *one.keywords.values())
        case MethodType():
            return (one.__self__,)
        case FunctionType():
            return [cell.cell_contents for cell in one.__closure__ or ()]
    names = [name for kind in type(one).__mro__ for name in kind.__dict__.get("__slots__", ())]
    return [*(getattr(one, name) for name in names if hasattr(one, name)), *getattr(one, "__dict__", {}).values()]


def replace_numbers(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy numbers into tensors that stay where they are; a ValueError is raised before that if they are not alike."""
    shapes = [[(one.shape, one.dtype) for one in tensors] for tensors in (targets, sources)]
    if shapes[0] != shapes[1]:
        raise ValueError("weights must have the shapes and dtypes of those that the engine began with, got others")
    with torch.inference_mode():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def memory_of(tensors: Iterable[Tensor]) -> list[NDArray[np.uint8]]:
    """Return the memory that tensors on the host lie in, `[bytes]` each, each once."""
    return [_bytes(one).numpy() for one in _storages(tensors)]


def checksums_of(tensors: Iterable[Tensor]) -> list[str]:
    """Return the digest of each tensor, in hexadecimal digits; one copy is on the host at a time."""
    return [
        sha256(one.to("cpu", copy=True).contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()
        for one in tensors
    ]


class DeviceMemory:
    """The storages of those of some tensors that are where the first is; nothing may use them without memory."""

    __slots__ = ("_copies", "_sizes", "_storages")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._storages = _storages(one for one in tensors if one.device == tensors[0].device)
        self._sizes = [one.nbytes() for one in self._storages]
        self._copies: list[Tensor] | None = None
        """What they hold, on the host; None: it is not kept."""  # written by: give_back, take

    def give_back(self, *, keeps: bool) -> None:
        """Leave them without memory; `keeps`: with copies of what they hold on the host."""
        self._copies = [_bytes(one).to("cpu", copy=True) for one in self._storages] if keeps else None
        for one in self._storages:
            one.resize_(0)

    def take(self) -> None:
        """Give them memory again, with what was kept, or with zeros.

        Raises:
            torch.OutOfMemoryError: the device has no room.
        """
        for one, size in zip(self._storages, self._sizes, strict=True):
            one.resize_(size)
        with torch.inference_mode():
            for number, one in enumerate(self._storages):
                own = _bytes(one)
                if self._copies is None:
                    own.zero_()
                else:
                    own.copy_(self._copies[number])
        self._copies = None


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    return list({one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors if one.numel()}.values())


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
