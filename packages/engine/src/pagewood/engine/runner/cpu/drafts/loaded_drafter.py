"""A draft model or a drafting head from its folder, up to the object that drafts in the CPU's program."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias

from pagewood.engine.api import ActivationFormat, Progress, WeightFormat
from pagewood.engine.model_folder.folder import FoundDrafter
from pagewood.engine.model_folder.load import check_draft, load_head
from pagewood.engine.model_folder.model_digest import ModelDigest
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.models.head import Head
from pagewood.engine.models.stored.tensor_files import TensorFiles
from pagewood.engine.runner.cpu.compiled.instruction import Unit
from pagewood.engine.runner.cpu.compiled.products.packed_weights import ProductLevel
from pagewood.engine.runner.cpu.compiled.products.weight_kind import WeightKind
from pagewood.engine.runner.cpu.drafts.draft_model import DraftModel
from pagewood.engine.runner.cpu.drafts.drafting import DrafterParts, ProgramDrafter
from pagewood.engine.runner.cpu.drafts.eagle import EagleDrafter
from pagewood.engine.runner.cpu.drafts.valid_slots import drafter_layouts
from pagewood.engine.runner.cpu.program.division import RequestDivision
from pagewood.engine.runner.cpu.program.exchange import Exchange
from pagewood.engine.runner.cpu.program.ops import CPUOps
from pagewood.engine.runner.cpu.program.passes import RowTables
from pagewood.engine.runner.cpu.program.tape import Buffer
from pagewood.engine.runner.cpu.weights.loaded_model import load_cpu_model
from pagewood.engine.runner.cpu.weights.matrix_memory import MatrixMemory
from pagewood.engine.runner.cpu.weights.packer import Packer
from pagewood.engine.runner.storage import AnyLayout, AnyStorage, storage_for
from pagewood.kvpool import JointLayout
from pagewood.kvpool.memory import PageMemory, SharedBytes, allocate, allocate_joint

ReadHead: TypeAlias = Callable[[Decoder[Buffer], TensorFiles | None], tuple[Head[Buffer], CPUOps, MatrixMemory]]


@dataclass(frozen=True, slots=True, kw_only=True)
class JointMemory:
    """The memory of a target and its drafter."""

    whole: PageMemory
    """Memory of whole pages, or of the frames of the target: for tiers and for the `Populator`."""
    beside: PageMemory | None = None
    """Memory of the drafter, if the target's pages have frames; None: it is a part of `whole`."""
    target: AnyStorage
    drafter: AnyStorage
    tags: PageMemory


@dataclass(frozen=True, slots=True)
class DrafterMemory:
    """The memory that a drafter has beside that of its target, which other processes know without its weights."""

    config: ModelConfig
    """The draft model, or the layers of the head."""

    def memory_layout(self, target: AnyLayout) -> AnyLayout:
        """Return the layout of its keys and values, or latents, beside the memory of the target."""
        return self.config.memory_layout(page_size=target.page_size, dtype=target.dtype, order="HND")

    def layout(self, target: AnyLayout) -> JointLayout:
        """Return the layout of pages that hold the target's KV in `target`, the drafter's, and its tags."""
        return JointLayout(parts=(target, *drafter_layouts(self.memory_layout(target))))

    def layout_beside(self, target: AnyLayout) -> JointLayout:
        """Return the layout of pages that hold the drafter's KV and its tags only."""
        return JointLayout(parts=drafter_layouts(self.memory_layout(target)))

    def allocate(
        self,
        target: AnyLayout,
        num_pages: int,
        *,
        num_frames: int | None = None,
        shared: SharedBytes | None = None,
    ) -> JointMemory:
        """Allocate the memory of `layout`.

        Args:
            target: of the target's pages, or of its frames.
            num_pages: that the drafter has memory for.
            num_frames: of the target, whose memory the drafter's then lies beside, in `layout_beside`; None: its pages
                are whole.
            shared: see `kvpool.memory.allocate`.
        """
        own = self.memory_layout(target)
        if num_frames is not None:
            storage = storage_for(target, num_frames, memory=allocate(target, num_frames, shared=shared))
            beside, (tags, for_drafter) = allocate_joint(self.layout_beside(target), num_pages, shared=shared)
            drafter = storage_for(own, num_pages, memory=for_drafter)
            return JointMemory(whole=storage.memory, beside=beside, target=storage, drafter=drafter, tags=tags)
        whole, (for_target, tags, for_drafter) = allocate_joint(self.layout(target), num_pages, shared=shared)
        return JointMemory(
            whole=whole,
            target=storage_for(target, num_pages, memory=for_target),
            drafter=storage_for(own, num_pages, memory=for_drafter),
            tags=tags,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDrafter:
    """What drafts for a target, with its weights."""

    model: Decoder[Buffer] | Head[Buffer]
    target: Decoder[Buffer]
    variants: frozenset[tuple[WeightKind, ProductLevel]]
    """Kernels that its weights need, see `CPUOps.variants`."""
    units: Collection[Unit]
    """Further ones, see `CPUOps.units`."""
    root: int
    """Stands for the drafter's weights in the tags of slots, 64 signed bits."""
    matrices: MatrixMemory
    """The memory of its own matrices."""
    read_head: ReadHead | None = None
    """Reads a head again; None: it is a draft model."""

    def again(self, target: Decoder[Buffer], files: TensorFiles) -> LoadedDrafter:
        """Return it for a target with the tensors of `files`; a head in the target's own folder is read from these.

        Errors are those of `load_head`.
        """
        if self.read_head is None:
            return replace(self, target=target)
        head, _, matrices = self.read_head(target, files)
        return replace(self, target=target, model=head, matrices=matrices, root=_root(None, None, mark=""))

    @property
    def parts(self) -> DrafterParts:
        """What changes with the weights of the target."""
        return DrafterParts(model=self.model, root=self.root)

    @property
    def memory(self) -> DrafterMemory:
        """What it has beside the memory of the target."""
        return DrafterMemory(self.model.config if isinstance(self.model, Decoder) else self.model.config.layer)

    def maker(
        self, memory: JointMemory, *, max_tokens: int, uses_rejection: bool = False
    ) -> Callable[[RowTables, RequestDivision | None], ProgramDrafter]:
        """Return the argument `make_drafter` of `CPURunner`.

        Args:
            memory: from `DrafterMemory.allocate`.
            max_tokens: most drafts of a row in a step.
            uses_rejection: whether drafts are verified by rejection sampling.
        """

        def make(rows: RowTables, division: RequestDivision | None) -> ProgramDrafter:
            model, target = self.model, self.target
            if isinstance(model, Decoder):
                return DraftModel(
                    model, memory.drafter, memory.tags, rows, max_tokens=max_tokens, root=self.root,
                    uses_rejection=uses_rejection, division=division,
                )  # fmt: skip
            return EagleDrafter(
                model, target, memory.drafter, memory.tags, rows, max_tokens=max_tokens, root=self.root,
                uses_rejection=uses_rejection, division=division,
            )  # fmt: skip

        return make


def load_drafter(
    found: FoundDrafter,
    target: Decoder[Buffer],
    target_folder: Path,
    *,
    target_digest: bytes | None = None,
    target_mark: str = "",
    weights: WeightFormat = "float32",
    activations: ActivationFormat = "auto",
    num_threads: int = 1,
    exchange: Exchange | None = None,
    progress: Progress | None = None,
) -> LoadedDrafter:
    """Load the draft model, or the head of `target`, whose own weights are float32; the part that its rank has.

    Args:
        found: of kind draft or eagle.
        target: the decoder that verifies.
        target_folder: its folder.
        target_digest: of the target; None: it is not known, or no file of this run depends on it.
        target_mark: `LoadedModel.mark` of the target.
        weights: the form of the target's weights, which a draft model gets too.
        activations: those of the target, which a draft model gets too.
        num_threads: see `load_cpu_model`.
        exchange: with the other ranks of the target; None: it is whole.
        progress: called for every tensor.

    Raises:
        FileNotFoundError: see `load_model`.
        ValueError: it does not fit the target; see `check_draft` and `load_head`.
    """
    assert found.folder is not None
    digest = ModelDigest(found.folder)
    variants: frozenset[tuple[WeightKind, ProductLevel]] = frozenset()
    units: Collection[Unit] = ()
    mark, read_head = target_mark, None
    if found.kind == "draft":
        check_draft(found.folder, target_folder)
        loaded = load_cpu_model(
            found.folder,
            weights,
            activations=activations,
            digest=digest,
            num_threads=num_threads,
            shard=target.shard,
            exchange=exchange,
            progress=progress,
        )
        model, variants, mark = loaded.model, loaded.variants, loaded.mark
        units, matrices = loaded.units, loaded.memory
    else:
        read_head = partial(_read_head, found.folder, target_folder, exchange)
        model, ops, matrices = read_head(target, None, progress=progress)
        variants, units = frozenset(ops.variants), tuple(ops.units)
    if target_digest is not None:
        digest.begin()
    known = digest.known() if target_digest is None or target.shard.is_whole else digest.wait()  # the same on all ranks
    root = _root(known, target_digest, mark=f"{found.kind}{mark}")
    return LoadedDrafter(
        model=model, target=target, variants=variants, units=units, root=root, matrices=matrices, read_head=read_head
    )


def _read_head(
    folder: Path,
    target_folder: Path,
    exchange: Exchange | None,
    target: Decoder[Buffer],
    files: TensorFiles | None,
    *,
    progress: Progress | None = None,
) -> tuple[Head[Buffer], CPUOps, MatrixMemory]:
    """Read a head from its folder, or from the `files` of its target if that is its folder too."""
    packer = Packer("float32")
    ops = CPUOps(packer, exchange=exchange)
    own = files if folder == target_folder else None
    return load_head(folder, target, ops, progress=progress, files=own), ops, MatrixMemory.of(packer)


def _root(digest: bytes | None, target_digest: bytes | None, *, mark: str) -> int:
    """Return 64 signed bits that stand for two models; without both digests, random ones that no other process has."""
    if digest is None or target_digest is None:
        return int.from_bytes(os.urandom(8), "little", signed=True)
    return int.from_bytes(sha256(digest + target_digest + mark.encode()).digest()[:8], "little", signed=True)
