"""Replaces torch's own CUDA operations on the emulated GPU by its CPU operations.

torch's kernels come without PTX, so they cannot be translated. Instead, the CPU operation is queued on the current
stream, over the same memory.
"""

# pyright: basic

from __future__ import annotations

import ctypes
import itertools
import os
import traceback
import warnings
from typing import Any

import torch

_KEPT = (
    "empty", "empty_strided", "set_", "resize_", "record_stream", "_pin_memory", "is_pinned", "as_strided", "copy_",
    "view", "_reshape_alias", "unfold", "_efficientzerotensor", "pin_memory", "is_set_to", "_resize_output_", "alias",
)  # fmt: skip
_AT_ONCE = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "item")
"""Operations that return a number to the host, or whose result has a shape that depends on data."""

_runtime = ctypes.CDLL(os.environ["LD_PRELOAD"])
_Call = ctypes.CFUNCTYPE(None, ctypes.c_uint64)
_runtime.emulated_enqueue.argtypes = [ctypes.c_void_p, _Call, ctypes.c_uint64]
_runtime.cudaMemcpyAsync.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_waiting: dict[int, Any] = {}
_captured: dict[int, Any] = {}
_numbers = itertools.count()


@_Call
def _run(number: int) -> None:
    task = _waiting.pop(number, None) or _captured[number]
    try:
        with torch.inference_mode():
            task()
    except BaseException:
        traceback.print_exc()
        os.abort()


def _enqueue(task: Any) -> None:
    number = next(_numbers)
    _waiting[number] = _captured[number] = task
    if not _runtime.emulated_enqueue(torch.cuda.current_stream().cuda_stream, _run, number):
        del _captured[number]


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor over the memory of a device tensor."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    alias = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), storage.nbytes())
    return torch.empty(0, dtype=tensor.dtype).set_(alias, tensor.storage_offset(), tensor.shape, tensor.stride())


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(one, change) for one in value)
    if isinstance(value, dict):
        return {key: _mapped(one, change) for key, one in value.items()}
    return value


def _argument(value: torch.Tensor) -> torch.Tensor:
    return on_cpu(value) if value.is_cuda else value.clone()


def _tensor(value: Any) -> Any:
    """Return a tensor if a Python number was passed in place of one; torch takes 64 bits with a sign or without."""
    if not isinstance(value, (bool, int, float)):
        return value
    is_unsigned = isinstance(value, int) and value >= 1 << 63
    return torch.tensor(value, dtype=torch.uint64 if is_unsigned else None)


def _device(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value


def _replacement(overload: Any) -> Any:
    schema = overload._schema
    name = schema.name.removeprefix("aten::")
    written = [i for i, one in enumerate(schema.arguments) if one.alias_info is not None and one.alias_info.is_write]
    names = [one.name for one in schema.arguments]
    are_tensors = [isinstance(one.type, torch.TensorType) for one in schema.arguments]

    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple(
            _tensor(value) if is_tensor else value for value, is_tensor in zip(args, are_tensors, strict=False)
        )
        kwargs = {key: _device(value) for key, value in kwargs.items()}
        if name in _AT_ONCE:
            torch.cuda.current_stream().synchronize()
            result = overload(*_mapped(args, on_cpu), **_mapped(kwargs, on_cpu))
            return _mapped(result, lambda one: one.to("cuda")) if isinstance(result, torch.Tensor) else result
        targets = [args[i] if i < len(args) else kwargs[names[i]] for i in written]
        if any(isinstance(one, torch.Tensor) and not one.numel() for one in targets):  # they may need resizing
            grown = _flat(overload(*_mapped(args, _shape), **_mapped(kwargs, _shape)))
            for target, shape in zip(targets, grown, strict=True):
                target.resize_(shape.shape)
        mine, its = _mapped(args, _argument), _mapped(kwargs, _argument)
        if written:
            _enqueue(lambda: overload(*mine, **its))
            return targets[0] if len(schema.returns) == 1 else tuple(targets) if schema.returns else None
        shapes = overload(
            *_mapped(args, _shape), **_mapped(kwargs, _shape) | ({"device": "meta"} if "device" in kwargs else {})
        )
        results = _mapped(
            shapes, lambda one: torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="cuda")
        )
        aliases = _mapped(results, on_cpu)

        def task() -> None:
            found = overload(*mine, **its)
            for target, one in zip(_flat(aliases), _flat(found), strict=True):
                target.copy_(one)

        _enqueue(task)
        return results

    return call


def _shape(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [one for part in value for one in _flat(part)]


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if target.shape != source.shape:
        source = source.expand(target.shape)
    if not target.numel():
        return target
    is_plain = target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous()
    if target.is_cuda and source.is_cuda:
        to, from_ = on_cpu(target), on_cpu(source)
        _enqueue(lambda: to.copy_(from_))
        return target
    if is_plain:
        stream = torch.cuda.current_stream()
        _runtime.cudaMemcpyAsync(target.data_ptr(), source.data_ptr(), target.nbytes, 4, stream.cuda_stream)
        if not non_blocking:
            stream.synchronize()
        return target
    if target.is_cuda:
        return _copy(
            target,
            _copy(torch.empty_like(source, device="cuda", memory_format=torch.contiguous_format), source.contiguous()),
        )
    whole = _copy(torch.empty(source.shape, dtype=source.dtype), source.contiguous())
    return target.copy_(whole)


_libraries: list[Any] = []


def install() -> None:
    """Replace torch's CUDA kernels by its CPU operations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of each replacement
        _install()


def _install() -> None:
    library = torch.library.Library("aten", "IMPL", "CUDA")
    _libraries.append(library)
    for full in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
        if not full.startswith("aten::"):
            continue
        name, _, overload_name = full.removeprefix("aten::").partition(".")
        overload = getattr(getattr(torch.ops.aten, name, None), overload_name or "default", None)
        if overload is None or name in _KEPT:
            continue
        returns = overload._schema.returns
        if any(one.alias_info is not None and not one.alias_info.is_write for one in returns):
            continue  # a view
        library.impl(full.removeprefix("aten::"), _replacement(overload), allow_override=True)  # type: ignore
    library.impl("copy_", _copy)  # not registered for CUDA by torch itself
