"""Compiles all that the CPU runner needs before the first request."""

from __future__ import annotations

from pagewood.engine.api import Progress
from pagewood.engine.runner.cpu.compiled import chains, drafting, layout, tree
from pagewood.engine.runner.cpu.compiled.kernel import Kernel
from pagewood.engine.runner.cpu.compiled.step import step_kernel


def warm_up(
    head_dim: int, *, int8: bool = False, draft_head_dim: int | None = None, progress: Progress | None = None
) -> Kernel:
    """Load every kernel from the cache on disk, or compile it and store it there; return the step's.

    Args:
        head_dim: elements of a head.
        draft_head_dim: elements of a head of the draft model, or of the head that drafts; None: there is neither.
        int8: whether the KV memory is int8 with scales, or float32.
        progress: called with what is being loaded or compiled.
    """
    step = step_kernel(head_dim, int8=int8, other_dim=draft_head_dim)
    plans = (chains.plan_model, chains.plan_head, chains.lay_out_chains, chains.lay_out_pairs)
    drafts = () if draft_head_dim is None else (drafting.adjust, *plans, tree.shape)
    kernels = (layout.update, layout.lay_out, layout.collect, *drafts, step)
    doing = "loading"
    for done, kernel in enumerate(kernels):
        if progress:
            progress(f"{doing} kernel {kernel.name}", done, len(kernels))
        kernel.compile()
        doing = "loading" if kernel.loaded else "compiling once, for this and later starts:"
    if progress:
        progress("kernels are ready", len(kernels), len(kernels))
    return step
