"""Compiles FlashInfer's kernels for a model before it is loaded, several at a time, with progress.

FlashInfer itself compiles each kernel at its first call, one after the other, which takes minutes on a new host.
Kernels that are compiled here are in FlashInfer's cache, where the first call finds them.

Source: the generators of flashinfer-python 0.7.2, as its wrappers call them.
"""

# pyright: basic
# FlashInfer has no types.

from __future__ import annotations

import importlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import torch

from pagewood.engine.api import Progress
from pagewood.engine.runner.cuda.attention import TENSOR_CORE_GROUP

_NUM_AT_A_TIME = 2  # each compiles up to ten files in parallel, with 2 to 3 GB of memory per file


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelNeeds:
    """The properties of a model that determine its attention kernels."""

    dtype: str
    head_dim: int
    group: int
    """Query heads per KV head."""
    has_windows: tuple[bool, ...]
    """(False,), (True,), or both: whether layers have a sliding window."""
    batch_invariant: bool = False
    has_soft_cap: bool = False
    kv_dtype: str | None = None
    """Dtype of the KV memory; None means `dtype`."""
    verifies: bool = False
    """Whether some steps have masks, in which windows are hidden too."""
    latent_rope_dim: int | None = None
    """Elements of the rotated key of a latent, whose other elements are `head_dim`; None: there are heads."""
    activations: tuple[str, ...] = ("silu",)
    """The activations of feed-forwards, by FlashInfer's names."""


def kernel_specs(needs: Sequence[KernelNeeds], *, prefill_backend: str) -> list[Any]:
    """Return the modules that FlashInfer must compile, each once.

    Args:
        needs: the needs of one or several models.
        prefill_backend: "fa2" or "fa3", whichever FlashInfer chooses on the device.
    """
    jit = importlib.import_module("flashinfer.jit")
    attention = importlib.import_module("flashinfer.jit.attention.modules")
    specs = [
        importlib.import_module("flashinfer.jit.norm").gen_norm_module(),
        importlib.import_module("flashinfer.jit.rope").gen_rope_module(),
        importlib.import_module("flashinfer.jit.page").gen_page_module(),
        importlib.import_module("flashinfer.jit.sampling").gen_sampling_module(),
        *(jit.activation.gen_act_and_mul_module(name) for name in sorted({a for n in needs for a in n.activations})),
    ]
    for need in needs:
        dtype = getattr(torch, need.dtype)
        kv_dtype = getattr(torch, need.kv_dtype) if need.kv_dtype else dtype
        if need.latent_rope_dim is not None:
            dims = (need.head_dim, need.latent_rope_dim)
            if need.batch_invariant:  # kernels of our own attend
                continue
            specs.append(jit.gen_batch_mla_module(prefill_backend, dtype, dtype, dtype, torch.int32, *dims, False))
            continue
        prefill = "fa2" if need.batch_invariant or kv_dtype != dtype else prefill_backend
        if need.verifies:
            shape = (dtype, kv_dtype, dtype, torch.int32, need.head_dim, need.head_dim, 0, False,
                     need.has_soft_cap)  # fmt: skip
            specs.append(attention._gen_batch_prefill_primary_module("fa2", *shape, False))
        for has_window in need.has_windows:
            shape = (dtype, kv_dtype, dtype, torch.int32, need.head_dim, need.head_dim, 0, has_window,
                     need.has_soft_cap)  # fmt: skip
            if need.batch_invariant or need.group >= TENSOR_CORE_GROUP or prefill == "fa2":
                specs.append(attention._gen_batch_prefill_primary_module("fa2", *shape, False))
            if prefill == "fa3":
                specs.append(attention.gen_batch_prefill_module("fa3", *shape, False))
            if not need.batch_invariant and need.group < TENSOR_CORE_GROUP:
                specs.append(attention.gen_batch_decode_module(*shape))
    return list({spec.name: spec for spec in specs}.values())


def compile_kernels(needs: Sequence[KernelNeeds], *, progress: Progress | None = None) -> None:
    """Compile the missing kernels for the current CUDA device.

    Raises:
        RuntimeError: the compiler failed; the message contains its output.
    """
    choices = importlib.import_module("flashinfer.utils")
    device = torch.device("cuda", torch.cuda.current_device())
    backends = {
        need: choices.determine_attention_backend(
            device, 0, False, False, getattr(torch, need.dtype), getattr(torch, need.dtype),
            head_dim_qk=need.head_dim, head_dim_vo=need.head_dim,
        )
        if need.latent_rope_dim is None
        else choices.determine_mla_backend(device)
        for need in needs
    }  # fmt: skip
    specs = {
        spec.name: spec for need, backend in backends.items() for spec in kernel_specs([need], prefill_backend=backend)
    }
    with ThreadPoolExecutor(_NUM_AT_A_TIME) as pool:
        jobs = [pool.submit(spec.build_and_load) for spec in specs.values()]
        for done, job in enumerate(as_completed(jobs)):
            job.result()
            if progress:
                progress("compiling kernels", done + 1, len(jobs))


def compile_experts(where: torch.device, progress: Progress | None = None) -> None:
    """Compile the fused kernels of mixtures for the device `where`, which takes many minutes; on a CPU there are none.

    Raises:
        RuntimeError: the compiler is missing, or failed; the message contains its output.
        ValueError: there are none for the compute capability of the device.
    """
    if where.type == "cpu":
        return
    if progress:
        progress("compiling FlashInfer's kernels of experts", 0, 1)
    major, minor = torch.cuda.get_device_capability(where)
    importlib.import_module("flashinfer.fused_moe.core").get_cutlass_fused_moe_module(f"{major * 10 + minor}")
    if progress:
        progress("compiling FlashInfer's kernels of experts", 1, 1)
