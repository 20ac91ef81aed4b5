"""Compiles all that the CPU runner needs before the first request."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence

from pagewood.engine.api import Progress
from pagewood.engine.runner.cpu.compiled import layout
from pagewood.engine.runner.cpu.compiled.attention.heads import heads_unit
from pagewood.engine.runner.cpu.compiled.attention.latents import latents_unit
from pagewood.engine.runner.cpu.compiled.drafting import chains
from pagewood.engine.runner.cpu.compiled.instruction import Unit
from pagewood.engine.runner.cpu.compiled.machine.kernel import Kernel
from pagewood.engine.runner.cpu.compiled.products.packed_weights import ProductLevel, packed_unit
from pagewood.engine.runner.cpu.compiled.products.weight_kind import WeightKind
from pagewood.engine.runner.cpu.compiled.step import StepKernel, step
from pagewood.engine.runner.cpu.compiled.units import COMMON, DRAFTING, STASHES
from pagewood.kvpool import LatentLayout, MultiHeadLayout

_log = logging.getLogger(__name__)


def warm_up(
    memory: int | MultiHeadLayout | LatentLayout,
    *,
    int8: bool = False,
    head_dims: Collection[int] = (),
    sees_later: bool = False,
    sees_images: bool = False,
    drafter: int | MultiHeadLayout | LatentLayout | None = None,
    packed: Collection[tuple[WeightKind, ProductLevel]] = (),
    others: Iterable[Unit] = (),
    host: Iterable[Kernel] = (),
    progress: Progress | None = None,
) -> StepKernel:
    """Load every kernel from the cache on disk, or compile it and store it there; return what runs programs.

    Args:
        memory: the layout of the KV memory, or the elements of a head; with a layout, `int8` follows from it.
        head_dims: elements of heads of both, where layers have several sizes.
        sees_later: whether tokens see later ones, as in encoders.
        sees_images: whether tokens of an image see all of it, in `memory`.
        drafter: the same as `memory`, of the draft model or the head that drafts; None: there is neither.
        int8: whether the KV memory is int8 with scales, or float32.
        packed: forms of weights other than float32, see `CPUOps.variants`.
        others: kernels that only some models need, see `CPUOps.units`.
        host: kernels that only some models need on the host, before a step.
        progress: called with what is being loaded or compiled.
    """
    units = [*COMMON]
    for one, sees_all in ((memory, sees_images), (drafter, False)):
        if one is None:
            continue
        is_int8 = int8 if isinstance(one, int) else one.dtype == "int8"
        if isinstance(one, LatentLayout):
            units.append(latents_unit(one.latent_dim + one.rope_dim, one.latent_dim, int8=is_int8))
            continue
        dims = head_dims or (one if isinstance(one, int) else one.head_dim,)
        units += [heads_unit(dim, int8=is_int8, sees_later=sees_later, sees_images=sees_all) for dim in sorted(dims)]
    units += [packed_unit(*one) for one in sorted(packed)]
    units += others
    if drafter is not None:
        units += [DRAFTING, STASHES]
    units = [*dict.fromkeys(units)]
    plans = (chains.plan_model, chains.plan_head, chains.lay_out_chains, chains.lay_out_pairs)
    drafts = () if drafter is None else plans
    tables = (layout.update, layout.find_live, layout.lay_out, layout.collect, layout.open_gate)
    kernels = (*tables, *host, *drafts, *(unit.kernel for unit in units), step)
    pending, done, doing = list(kernels), 0, "loading"
    for waits in (False, True):  # what another process compiles now is left for the end, and loaded then
        left: list[Kernel] = []
        for kernel in pending:
            if progress:
                progress(f"{doing} kernel {kernel.name}", done, len(kernels))
            if not kernel.compile(waits=waits):
                left.append(kernel)
                continue
            done += 1
            doing = "loading" if kernel.loaded else "compiling once, for this and later starts:"
        pending = left
    log_not_kept(kernels)
    if progress:
        progress("kernels are ready", len(kernels), len(kernels))
    return StepKernel(units)


def log_not_kept(kernels: Sequence[Kernel]) -> None:
    """Log how many kernels could not be stored, and why."""
    failures = [failure for failure in (kernel.not_kept for kernel in kernels) if failure is not None]
    if failures:
        folder, error = failures[0]
        _log.warning(
            "%d compiled kernels cannot be kept in %s, so the next start compiles them again: %s; make room there, or "
            "set XDG_CACHE_HOME to a folder that can be written",
            len(failures), folder, error,
        )  # fmt: skip
