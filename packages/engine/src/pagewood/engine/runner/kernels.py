"""Compiling everything that the CPU runner needs, before the first request."""

from __future__ import annotations

from collections.abc import Callable

from pagewood.engine.runner.compiled import attention, matmul, rows, sampling
from pagewood.engine.runner.compiled.attention import AttentionKernels, attention_kernels

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many of its parts are done, and how many there are."""


def warm_up(head_dim: int, *, progress: Progress | None = None) -> AttentionKernels:
    """Load every kernel from the cache on disk, or compile it and store it there; return those of `head_dim`."""
    own = attention_kernels(head_dim)
    kernels = (
        matmul.multiply,
        matmul.multiply_parallel,
        rows.norm,
        rows.norm_parallel,
        rows.add_norm,
        rows.add_norm_parallel,
        rows.silu_mul,
        rows.silu_mul_parallel,
        rows.split_heads,
        rows.split_heads_parallel,
        attention.cut,
        sampling.draw_tokens,
        own.attend,
        own.attend_parallel,
    )
    doing = "loading"
    for done, kernel in enumerate(kernels):
        if progress:
            progress(f"{doing} kernel {kernel.name}", done, len(kernels))
        kernel.compile()
        doing = "loading" if kernel.loaded else "compiling once, for this and later starts:"
    if progress:
        progress("kernels are ready", len(kernels), len(kernels))
    return own
