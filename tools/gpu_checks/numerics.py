"""Checks of single operations and of every attention path against plain torch on the CPU."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu_checks.host import Failed, Host, difference
from pagewood.engine.models.parts.attention import AttentionConfig
from pagewood.engine.runner.cuda.attention import (
    STAGING_BYTES,
    WORKSPACE_BYTES,
    FlashInferAttention,
    HostArrays,
    PageArrays,
    Places,
    offsets_of,
)
from pagewood.engine.runner.cuda.attention_shape import AttentionShape
from pagewood.engine.runner.cuda.kernels.flashinfer_api import FlashInfer
from pagewood.engine.runner.cuda.kernels.flashinfer_compile import KernelNeeds
from pagewood.kvpool import MultiHeadLayout
from pagewood.kvpool.storage import KVStorage
from stand_ins import flashinfer_torch

HEAD_DIM = 64
KERNELS = [
    KernelNeeds(dtype=dtype, head_dim=HEAD_DIM, group=group, has_windows=(special,), has_soft_cap=special)
    for dtype, special, group in (
        ("float16", False, 1),
        ("float16", False, 4),
        ("float16", True, 1),
        ("float16", True, 4),
        ("bfloat16", False, 1),
        ("bfloat16", False, 4),
    )
]
"""Each takes minutes to compile; to have few, a window and a soft cap are checked together."""
FP8_KERNELS = [
    KernelNeeds(dtype="float16", head_dim=HEAD_DIM, group=group, has_windows=(False,), kv_dtype="float8_e4m3fn")
    for group in (1, 4)
]
_MANY_TOKENS = 20_000
"""From about 8,000 tokens on, FlashInfer uses another rotary kernel, which must give the same bits."""
STEPS = {
    "decode": [(0, 1), (63, 1), (64, 1), (700, 1)],
    "prefill": [(0, 70), (0, 5), (0, 129)],
    "mixed": [(0, 70), (33, 1), (130, 65), (1, 1), (0, 1)],
}
"""Grants as (first position, tokens)."""


def check_operations(host: Host) -> str:
    """FlashInfer's norms, rotation, activation, softmax and filters agree with plain torch."""
    found = [
        f"{operation.__name__} in {dtype}: {problem}"
        for operation, dtype in operations()
        if (problem := _compare(operation, host, dtype))
    ]
    return _verdict(found, len(operations()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """An attention path: one combination of kernel, shape, step and mode."""

    needs: KernelNeeds
    group: int
    page_size: int
    step: str
    batch_invariant: bool

    def __str__(self) -> str:
        """Describe the path in messages."""
        special = " with window and soft cap" if self.needs.has_soft_cap else " over fp8" if self.needs.kv_dtype else ""
        mode = " batch-invariant" if self.batch_invariant else ""
        return f"{self.needs.dtype}{mode} {self.step}{special}, group {self.group}, pages of {self.page_size}"


def check_attention(host: Host) -> str:
    """Attention agrees with plain torch: decode, prefill, mixed steps, pages of 1, 16, 64, window and soft cap."""
    return compare_paths(host, KERNELS)


def paths_of(kernels: Sequence[KernelNeeds]) -> list[Path]:
    """Return every path that uses one of the kernels."""
    return [
        Path(needs=needs, group=group, page_size=page_size, step=step, batch_invariant=batch_invariant)
        for needs, page_size, step, batch_invariant in itertools.product(kernels, (1, 16, 64), STEPS, (False, True))
        for group in ((1, 3) if needs.group == 1 else (4, 8))
    ]


def compare_paths(host: Host, kernels: Sequence[KernelNeeds]) -> str:
    """Compare attention on the device with plain torch, on every path that uses one of the kernels."""
    paths = paths_of(kernels)
    found: list[str] = []
    for path in paths:
        try:
            mine = attend(host.flashinfer, host.where, path)
            problem = difference(mine, attend(flashinfer_torch, torch.device("cpu"), path), path.needs.dtype)
        except Exception as error:  # the remaining paths still run
            problem = f"{type(error).__name__}: {error}"
        if problem:
            found.append(f"{path}: {problem}")
    return _verdict(found, len(paths))


def check_repeats(host: Host) -> str:
    """Long prefills give the same bits when repeated; they would not if warps failed to wait for each other."""
    is_fast = host.is_gpu and not host.is_slow
    step, count = ([(0, 2000)] * 8, 50) if is_fast else ([(0, 150)] * 2, 2)
    needs = [need for need in KERNELS if not need.has_soft_cap]
    for need in needs:
        path = Path(needs=need, group=need.group, page_size=16, step="prefill", batch_invariant=False)
        first = attend(host.flashinfer, host.where, path, step)
        num_different = sum(
            not torch.equal(attend(host.flashinfer, host.where, path, step), first) for _ in range(count)
        )
        if num_different:
            raise Failed(f"{path}: {num_different} of {count} differ from the first")
    return f"{len(needs)} kernels, {count} times {sum(size for _, size in step)} tokens each"


def attend(
    flashinfer: FlashInfer, where: torch.device, path: Path, step: Sequence[tuple[int, int]] | None = None
) -> Tensor:
    """Return the attention of a step, with the same random inputs for every library."""
    step, page_size = step or STEPS[path.step], path.page_size
    special = path.needs.has_soft_cap
    layer = AttentionConfig(
        num_heads=2 * path.group,
        num_kv_heads=2,
        head_dim=HEAD_DIM,
        rope=None,
        scale=HEAD_DIM**-0.5,
        window=50 if special else None,
        soft_cap=20.0 if special else None,
    )
    shape = AttentionShape.of([layer], dtype=path.needs.dtype)
    starts, counts = (np.array(column, np.int32) for column in zip(*step, strict=True))
    pages = PageArrays.of(starts + counts, page_size=page_size)
    layout = MultiHeadLayout(
        num_layers=1,
        num_kv_heads=2,
        head_dim=HEAD_DIM,
        page_size=page_size,
        dtype=path.needs.kv_dtype or path.needs.dtype,
    )
    storage = KVStorage(layout, int(pages.kv_indptr[-1]), device=where)
    generator = torch.Generator().manual_seed(1)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(where, getattr(torch, path.needs.dtype))

    storage.layer(0).copy_(random(*storage.layer(0).shape))
    positions = np.concatenate([np.arange(start, start + count, dtype=np.int32) for start, count in step])
    indices = torch.randperm(storage.num_pages, generator=generator, dtype=torch.int32)
    attention = FlashInferAttention(
        flashinfer,
        storage,
        shape,
        batch_invariant=path.batch_invariant,
        workspace_bytes=WORKSPACE_BYTES if where.type == "cuda" else 16,
    )
    empty = attention.num_empty_grants(len(positions), len(step))

    def extended(array: np.ndarray, value: int) -> Tensor:
        return torch.from_numpy(np.concatenate([array, np.full(empty, value, np.int32)]))

    offsets = offsets_of(counts)
    kv_indptr, last_page_len = extended(pages.kv_indptr, pages.kv_indptr[-1]), extended(pages.last_page_len, 1)
    places = Places(
        grants=torch.from_numpy(np.repeat(np.arange(len(step), dtype=np.int32), counts)).to(where),
        positions=torch.from_numpy(positions).to(where),
        kv_indptr=kv_indptr.to(where),
        kv_indices=indices.to(where),
        last_page_len=last_page_len.to(where),
    )
    host_arrays = HostArrays(
        is_decode=path.step == "decode",
        qo_indptr=extended(offsets, offsets[-1]),
        kv_indptr=kv_indptr,
        last_page_len=last_page_len,
        kv_lens=extended(starts + counts, 0),
    )
    staging = {
        window: torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=where.type == "cuda")
        for window in shape.all_windows_left
    }
    planned = attention.plan(host_arrays, places, staging)
    size = len(positions)
    q, k, v = random(size, 2 * path.group * HEAD_DIM), random(size, 2 * HEAD_DIM), random(size, 2 * HEAD_DIM)
    qkv = torch.cat([q, k, v], -1)  # views of one tensor, as in the runner
    q, k, v = qkv.split([q.shape[1], k.shape[1], v.shape[1]], -1)
    result = planned.run(q, k, v, 0)
    if where.type == "cuda":
        torch.cuda.synchronize()  # memory allocated here must outlive the queued work
    return result


Operation = Callable[[FlashInfer, torch.device, torch.dtype], Tensor]


def _compare(operation: Operation, host: Host, dtype: str) -> str | None:
    torch.manual_seed(0)
    try:
        mine = operation(host.flashinfer, host.where, getattr(torch, dtype))
        torch.manual_seed(0)
        return difference(mine, operation(flashinfer_torch, torch.device("cpu"), getattr(torch, dtype)), dtype)
    except Exception as error:  # the remaining operations still run
        return f"{type(error).__name__}: {error}"


def _norms(library: FlashInfer, where: torch.device, dtype: torch.dtype) -> Tensor:
    x, residual, weight = (torch.randn(size).to(where, dtype) for size in ((9, 256), (9, 256), (256,)))
    normed = library.rmsnorm(x, weight, 1e-5)
    library.fused_add_rmsnorm(x, residual, weight, 1e-5)
    return torch.cat([normed, x, residual])


def _activation(library: FlashInfer, where: torch.device, dtype: torch.dtype) -> Tensor:
    return library.silu_and_mul(torch.randn(9, 512).to(where, dtype))


def _heads(library: FlashInfer, where: torch.device, dtype: torch.dtype) -> Tensor:
    """Norm and rotate views of one tensor in place, as the runner does."""
    qkv, weight, angles = (torch.randn(size) for size in ((9, 256), (64,), (64, 32)))
    qkv, weight = qkv.to(where, dtype), weight.to(where, dtype)
    table = torch.cat([angles.cos(), angles.sin()], -1).to(where)
    q, k, v = qkv.split([128, 64, 64], -1)
    heads = q.view(9, -1, 64)
    library.rmsnorm(heads, weight, 1e-5, out=heads)
    library.apply_rope_with_cos_sin_cache_inplace(torch.arange(9, dtype=torch.int32, device=where) * 7, q, k, 64, table)
    return torch.cat([q, k, v], -1)


def _rotations(library: FlashInfer, where: torch.device, dtype: torch.dtype) -> Tensor:
    """Rotate many tokens in one call and in small calls; return how many numbers differ."""
    angles = torch.randn(64, 32)
    table = torch.cat([angles.cos(), angles.sin()], -1).to(where)
    heads = torch.randn(_MANY_TOKENS, 1024).to(where, dtype)
    positions = (torch.arange(_MANY_TOKENS, dtype=torch.int32) % 64).to(where)
    many, few = heads.clone(), heads.clone()
    library.apply_rope_with_cos_sin_cache_inplace(positions, many[:, :512], many[:, 512:], 64, table)
    for rows in range(0, _MANY_TOKENS, 100):
        part = few[rows : rows + 100]
        library.apply_rope_with_cos_sin_cache_inplace(
            positions[rows : rows + 100], part[:, :512], part[:, 512:], 64, table
        )
    return (many.view(torch.int16) != few.view(torch.int16)).sum().float()


def _softmax(library: FlashInfer, where: torch.device, dtype: torch.dtype) -> Tensor:
    logits = (torch.randn(4, 1000) * 3).to(where)
    return library.softmax(logits, torch.tensor([0.5, 1.0, 1.5, 2.0], device=where))


def _filters(library: FlashInfer, where: torch.device, dtype: torch.dtype) -> Tensor:
    probs = (torch.randn(4, 1000) * 3).softmax(-1).to(where)
    top_ks = torch.tensor([1, 5, 50, 1000], dtype=torch.int32, device=where)
    top_ps = torch.tensor([0.1, 0.5, 0.9, 0.99], device=where)
    return torch.cat(
        [
            library.top_k_renorm_probs(probs, top_ks, is_deterministic=True),
            library.top_p_renorm_probs(probs, top_ps, is_deterministic=True),
        ]
    )


def operations() -> list[tuple[Operation, str]]:
    """Return every operation with its dtypes."""
    of_model = [(one, dtype) for one in (_norms, _activation, _heads, _rotations) for dtype in ("float16", "bfloat16")]
    return [*of_model, (_softmax, "float32"), (_filters, "float32")]


def _verdict(found: Sequence[str], count: int) -> str:
    if found:
        raise Failed(f"{len(found)} of {count}: " + "; ".join(found[:6]) + (" ..." if len(found) > 6 else ""))
    return f"{count} agree"
