"""What one process computes of a model on a CPU: its weights, kernels and KV memory, and the runner around them."""

# pyright: basic
# torch's conversions from numpy have no types.

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pagewood.engine.api import EngineConfig, Progress
from pagewood.engine.assembly.available_memory import available_memory_bytes
from pagewood.engine.assembly.host_pages import host_pages
from pagewood.engine.assembly.images import ImageUseOfModel
from pagewood.engine.assembly.ranks.expert_options import expert_change, expert_rows
from pagewood.engine.assembly.ranks.stage_place import StagePlace
from pagewood.engine.assembly.state_sizes import StateSizes, state_sizes
from pagewood.engine.core.loop import Runner
from pagewood.engine.core.memory.page_groups import most_pages
from pagewood.engine.core.observe.expert_load import ExpertRows
from pagewood.engine.model_folder.folder import FoundDrafter, find_drafter
from pagewood.engine.model_folder.load import check_draft
from pagewood.engine.model_folder.model_digest import ModelDigest
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.expert_division import division_mark
from pagewood.engine.models.head_config import HeadConfig
from pagewood.engine.models.shard import WHOLE, Shard
from pagewood.engine.models.stage import Stage
from pagewood.engine.models.stored.tensor_files import TensorFiles
from pagewood.engine.runner.cpu.compiled.drafting.chains import follow_rows
from pagewood.engine.runner.cpu.compiled.exchange import ROW_EXCHANGE, divide, gather_values
from pagewood.engine.runner.cpu.compiled.overlay import OVERLAY
from pagewood.engine.runner.cpu.compiled.products.dot import DotLevel
from pagewood.engine.runner.cpu.compiled.products.packed_weights import ProductLevel, WideLevel
from pagewood.engine.runner.cpu.compiled.products.weight_kind import WeightKind
from pagewood.engine.runner.cpu.compiled.step import StepKernel
from pagewood.engine.runner.cpu.compiled.units import STASHES
from pagewood.engine.runner.cpu.drafts.drafting import ProgramDrafter
from pagewood.engine.runner.cpu.drafts.loaded_drafter import (
    DrafterMemory,
    JointMemory,
    LoadedDrafter,
    load_drafter,
)
from pagewood.engine.runner.cpu.drafts.ngram import NgramLookup
from pagewood.engine.runner.cpu.drafts.suffix import SuffixIndex
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.populate import PopulatingRunner, Populator
from pagewood.engine.runner.cpu.program.adapters import CPUAdapters
from pagewood.engine.runner.cpu.program.division import RequestDivision
from pagewood.engine.runner.cpu.program.exchange import Exchange, StepWatch
from pagewood.engine.runner.cpu.program.images import CPUImages
from pagewood.engine.runner.cpu.program.passes import RowTables
from pagewood.engine.runner.cpu.program.relay import ChannelRelay
from pagewood.engine.runner.cpu.runner import CPURunner
from pagewood.engine.runner.cpu.weights.loaded_model import LoadedModel, load_cpu_model
from pagewood.engine.runner.cpu.weights.matrix_memory import MatrixMemory
from pagewood.engine.runner.processors import Process
from pagewood.engine.runner.ranks.segment import mapped
from pagewood.engine.runner.ranks.staged_runner import StagedRunner
from pagewood.engine.runner.storage import AnyStorage, storage_for
from pagewood.kvpool import JointLayout, LatentLayout, LayerGroups, MultiHeadLayout
from pagewood.kvpool.memory import PageMemory, SharedBytes, allocate, joined, shared_size
from pagewood.kvpool.tiers.pages.device import DevicePages
from pagewood.kvpool.tiers.torch_pages import device_pages, with_states

_log = logging.getLogger(__name__)

AnyLayout = MultiHeadLayout | LatentLayout
_OF_LAST_STAGE = ("suffix", "eagle")
"""Kinds of drafters that only the last stage has: an index of texts, and a head that reads its hidden states."""
LOOKUPS: dict[str, Callable[..., Any]] = {"ngram": NgramLookup, "suffix": SuffixIndex}
"""What finds drafts in the texts of a server, by the name of the option."""


class CPURank:
    """A model, or a rank's part of one. Invariant: all ranks of a model are made with equal arguments but for `shard`.

    It is built in stages, because memory is measured when the weights are there, and has one size for all ranks:
    `__init__` loads weights, `compile` the kernels, `num_pages` measures, `allocate` makes the KV memory, and
    `make_runner` what computes.

    Args:
        config: of the engine, resolved.
        folder: of the model.
        digest: of the folder.
        num_threads: of this process.
        shard: this rank, among those of its stage.
        stage: its layers; None: all.
        exchange: with the others of its stage; None: it is alone.
        relay: between stages; None: there is one.
        progress: called for every tensor.
        images: whether it takes images.

    Raises:
        ValueError: the configuration does not fit the model.
    """

    __slots__ = (
        "_beside", "_config", "_drafter", "_exchange", "_found", "_head", "_head_dims", "_images", "_kernel", "_load",
        "_make_drafter", "_max_position", "_num_threads", "_populators", "_runner", "_states", "_storage", "_units",
        "_variants", "adapters", "groups", "layout", "loaded", "memory", "page_bytes", "states",
    )  # fmt: skip

    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        digest: ModelDigest,
        *,
        num_threads: int,
        shard: Shard = WHOLE,
        stage: Stage | None = None,
        exchange: Exchange | None = None,
        relay: ChannelRelay | None = None,
        progress: Progress | None = None,
        images: ImageUseOfModel | None = None,
    ) -> None:
        self._config = config
        rows = None if images is None else images.of_rows(config.num_rows)
        self._images = None if rows is None else CPUImages(rows)
        self._exchange = exchange
        self._num_threads = num_threads
        self._found = None if config.speculative == "off" else _find_drafter(config, folder)
        head = self._head = None if self._found is None else _head_of(self._found, folder)
        self.adapters: CPUAdapters | None = None
        """The adapters of its projections; None: there are none."""
        if config.max_adapters:
            self.adapters = CPUAdapters(
                num_slots=config.max_adapters, max_rank=config.max_adapter_rank, num_rows=config.num_rows
            )
        self._load = partial(
            load_cpu_model,
            folder,
            config.weights,
            activations=config.activations,
            digest=digest,
            max_length=config.max_length,
            shard=shard,
            stage=stage,
            change=_changes(config, images),
            exchange=exchange,
            relay=relay if relay is None or head is None else replace(relay, needs=head.needs),
            adapters=self.adapters,
        )
        self.loaded = self._load(num_threads=num_threads, progress=progress)
        """The model."""  # written by: exchange
        self._runner: CPURunner | None = None  # written by: make_runner
        self._populators: list[Populator] = []  # written by: make_runner
        model, variants, units = self.loaded.model, self.loaded.variants, dict.fromkeys(self.loaded.units)
        self._max_position, self._head_dims = model.config.max_position, model.config.head_dims
        if config.activations == "bfloat16" and all(kind != WeightKind.BFLOAT16_PAIRS for kind, _ in variants):
            raise ValueError(
                f"activations must be auto or float32 unless weights are bfloat16, and with weights {config.weights!r} "
                f"those of this model are {_described(variants)}, got 'bfloat16'"
            )
        self._drafter: LoadedDrafter | None = None  # written by: exchange
        is_here = head is None or stage is None or stage.is_last  # a head is in the last stage only
        if is_here and self._found is not None and self._found.folder is not None:
            outlives = config.disk_cache_path is not None or config.remote_cache is not None
            self._drafter = load_drafter(
                self._found,
                model,
                folder,
                target_digest=(digest.known() if shard.is_whole else digest.wait()) if outlives else None,
                target_mark=self.loaded.mark,
                weights=config.weights,
                activations=config.activations,
                num_threads=num_threads,
                exchange=exchange,
                progress=progress,
            )
            variants |= self._drafter.variants
            units |= dict.fromkeys(self._drafter.units)
        if config.enable_dp_attention:
            units |= {ROW_EXCHANGE: None}
        if self._found is not None and model.config.states is not None:
            units |= {STASHES: None}
        if self._images is not None:
            units |= {OVERLAY: None}
        self._variants, self._units = variants, units
        if stage is None:
            self.groups = _groups(config, model.config, has_drafter=self._drafter is not None)
        else:  # stages with other numbers of layers would have other groups
            self.groups = model.config.groups(max_length=1)
        """The groups of layers, each of which gives memory back on its own."""
        self.layout = self._layout_of(model.config, self.groups)
        """The layout of a frame on this rank."""
        self.page_bytes = self._measured_page()
        """Bytes of a page on this rank, with its frames and what a drafter has beside them."""
        self.states: StateSizes = state_sizes(
            config,
            model.whole,
            page_bytes=self.page_bytes,
            state_bytes=self.state_bytes,
            available=available_memory_bytes() // config.ranks_per_node,
        )
        """How many states of recurrent layers this rank has room for."""
        self._states: PageMemory | None = None
        """The memory of states; None: no layer is recurrent."""  # written by: allocate
        self._kernel: StepKernel | None = None  # written by: compile
        self._storage: AnyStorage | None = None  # written by: allocate
        self._beside: PageMemory | None = None  # written by: allocate
        self._make_drafter: Callable[[RowTables, RequestDivision | None], ProgramDrafter] | None = None
        # written by: allocate
        self.memory: PageMemory | None = None
        """The memory of pages, or of their frames."""  # written by: allocate

    def load_again(self, files: TensorFiles) -> tuple[LoadedModel, LoadedDrafter | None]:
        """Return the model with the tensors of `files`, on one thread, and what drafts for it.

        Raises:
            ValueError: they are not those of the model, or in forms for which no kernels are loaded.
        """
        loaded = self._load(files=files, expert_rows=self.loaded.expert_rows)
        if not (loaded.variants <= self._variants and set(loaded.units) <= set(self._units)):
            raise ValueError(
                f"weights must have the forms of those that the engine began with, {_described(self._variants)}, "
                f"got {_described(loaded.variants)}"
            )
        return loaded, None if self._drafter is None else self._drafter.again(loaded.model, files)

    def exchange(self, loaded: LoadedModel, drafter: LoadedDrafter | None) -> None:
        """Compute later steps with what `load_again` has returned; no step is in flight."""
        assert self._runner is not None
        self._runner.exchange_model(loaded.model, None if drafter is None else drafter.parts)
        self.loaded, self._drafter = loaded, drafter

    @property
    def has_chosen_form(self) -> bool:
        """Whether the form of its weights does not depend on the dtypes in its files."""
        return self._config.weights != "auto"

    @property
    def drafter_matrices(self) -> MatrixMemory:
        """The memory of a drafter's matrices."""
        return MatrixMemory() if self._drafter is None else self._drafter.matrices

    def give_back_kv(self) -> None:
        """Give the KV memory to the system; no page is in use, and no step is launched before `provide_kv`.

        Raises:
            OSError: the system is not Linux.
        """
        for populator in self._populators:
            populator.give_back()
        if self._states is not None:
            self._states.release()

    def provide_kv(self) -> None:
        """Have the system provide the first KV memory again, as at the start."""
        for populator in self._populators:
            populator.reach(-1)

    @property
    def described_weights(self) -> str:
        """The forms of weights, as text for the log."""
        return _described(self._variants)

    @property
    def division(self) -> str:
        """What distinguishes the division of experts from others, which all ranks must have."""
        return division_mark(self.loaded.model.whole)

    @property
    def layers(self) -> tuple[int, int]:
        """The first layer that it has, and the first one behind."""
        return self.loaded.model.stage.first, self.loaded.model.stage.stop

    @property
    def expert_rows(self) -> ExpertRows | None:
        """The rows of experts; None: they are not counted."""
        return expert_rows(self._config, self.loaded.model.whole, self.loaded.expert_rows)

    @property
    def has_frames(self) -> bool:
        """Whether layers have windows, so that their memory is given back apart."""
        return len(self.groups.windows) > 1

    @property
    def beside(self) -> PageMemory | None:
        """The drafter's own memory by page id, where pages have frames; None: no drafter has memory of its own."""
        return self._beside

    @property
    def state_memory(self) -> PageMemory | None:
        """The memory of the states of recurrent layers; None: there are none."""
        return self._states

    @property
    def state_bytes(self) -> int:
        """Bytes of a state on this rank; 0: none of its layers is recurrent."""
        states = self.loaded.model.config.states
        return 0 if states is None else states.bytes_per_page

    @property
    def announces_pages(self) -> bool:
        """See `EngineInfo.announces_pages`."""
        return self._drafter is not None and self.has_frames

    def compile(self, progress: Progress | None = None) -> None:
        """Load the kernels, or compile them."""
        drafter = self._drafter
        self._kernel = warm_up(
            self.layout,
            head_dims=(*self._head_dims, *(drafter.memory.config.head_dims if drafter else ())),
            sees_later=self.loaded.model.config.is_encoder,
            sees_images=any(one.sees_images for one in self.loaded.model.config.attentions),
            drafter=drafter.memory.memory_layout(self.layout) if drafter else None,
            packed=self._variants,
            others=self._units,
            host=(divide, gather_values, follow_rows) if self._config.enable_dp_attention else (),
            progress=progress,
        )

    def num_pages(self, num_ranks: int) -> tuple[int, int]:
        """Return how many pages each rank has in the memory of the machine, which all share, and the longest request.

        Raises:
            ValueError: `max_total_tokens`, or the longest request, does not fit.
        """
        config = self._config
        if config.enable_dp_attention:  # each rank has its part of the requests, and of their tokens
            num_tokens, count = config.max_total_tokens, config.num_pools
            config = replace(
                config,
                max_running=-(-config.num_rows // count),
                max_total_tokens=None if num_tokens is None else num_tokens // count,
            )
        return host_pages(config, self._max_position, self.groups, self.page_bytes * num_ranks)

    def allocate(self, num_pages: int, num_states: int, *, shared: int | None = None) -> None:
        """Allocate the KV memory, and that of states.

        Args:
            num_pages: of all ranks.
            num_states: likewise.
            shared: descriptor of the memory that it lies in, of `shared_bytes`; None: it is new.
        """
        made = self._made(num_pages, num_states, shared)
        self.memory, self._storage, self._beside, self._states = made.memory, made.storage, made.beside, made.states
        if made.joint is not None:
            assert self._drafter is not None
            self._make_drafter = self._drafter.maker(
                made.joint,
                max_tokens=self._config.speculative_num_tokens,
                uses_rejection=self._config.speculative_verify == "rejection",
            )

    def shared_bytes(self, num_pages: int, num_states: int, stage: Stage | None = None) -> int:
        """Return the size of memory that holds what `allocate` allocates, or does on a rank of another stage."""
        num_pages_beside, num_frames = self._sizes(num_pages)
        layout, drafter, states = self._layout_in(stage), self._drafter_in(stage), self._config_in(stage).states
        num_bytes = 0 if states is None else shared_size(states, num_states)
        if drafter is None:
            return shared_size(layout, num_frames) + num_bytes
        if not self.has_frames:
            return shared_size(drafter.layout(layout), num_pages) + num_bytes
        beside = shared_size(drafter.layout_beside(layout), num_pages_beside)
        return shared_size(layout, num_frames) + beside + num_bytes

    def joined_memory(
        self, num_pages: int, num_states: int, others: Sequence[int], stages: Sequence[Stage | None]
    ) -> tuple[PageMemory, PageMemory | None, PageMemory | None]:
        """Return the memory of the ranks of this host as one pool: pages or frames, what is beside frames, and states.

        See `beside` and `state_memory`.

        Args:
            num_pages: of all ranks.
            num_states: likewise.
            others: descriptors of what the other ranks of this host have allocated.
            stages: of these ranks; None: the model has one.
        """
        assert self.memory is not None
        mades = [self._made(num_pages, num_states, one, stage) for one, stage in zip(others, stages, strict=True)]
        besides = [one for one in (self._beside, *(made.beside for made in mades)) if one is not None]
        states = [one for one in (self._states, *(made.states for made in mades)) if one is not None]
        memory = _joined([self.memory, *(made.memory for made in mades)])
        return memory, _joined(besides) if besides else None, _joined(states) if states else None

    def pages_by_request(self, num_pages: int, num_states: int, others: Sequence[int]) -> list[DevicePages]:
        """Return the pages of ranks 1 to R - 1, and their states, where each has those of its own requests."""
        found: list[DevicePages] = []
        for descriptor in others:
            made = self._made(num_pages, num_states, descriptor)
            pages = device_pages(made.memory)
            found.append(pages if made.states is None else with_states(pages, made.states))
        return found

    def _sizes(self, num_pages: int) -> tuple[int, int]:
        """Return pages beside frames, and frames."""
        num_frames = num_pages * len(self.groups.windows)
        return most_pages(self.groups.windows, num_frames) if self.has_frames else num_pages, num_frames

    def _layout_of(self, model: ModelConfig, groups: LayerGroups) -> AnyLayout:
        return model.memory_layout(
            page_size=self._config.page_size, dtype=self._config.kv_cache_dtype, order="HND", groups=groups
        )

    def _layout_in(self, stage: Stage | None) -> AnyLayout:
        """Return the layout of a frame on a rank of a stage; None: of this one."""
        if stage is None:
            return self.layout
        own = self._config_in(stage)
        return self._layout_of(own, own.groups(max_length=1))

    def _config_in(self, stage: Stage | None) -> ModelConfig:
        """Return what a rank of a stage computes; None: of this one."""
        model = self.loaded.model
        return model.config if stage is None else model.whole.for_stage(stage).for_shard(model.shard)

    def _drafter_in(self, stage: Stage | None) -> DrafterMemory | None:
        """Return what a drafter has on a rank of a stage beside a frame; None: nothing. Stage None: of this one."""
        if stage is not None and self._head is not None:
            return DrafterMemory(self._head.for_shard(self.loaded.model.shard).layer) if stage.is_last else None
        return None if self._drafter is None else self._drafter.memory

    def _made(self, num_pages: int, num_states: int, shared: int | None, stage: Stage | None = None) -> _Made:
        layout, drafter, of_state = self._layout_in(stage), self._drafter_in(stage), self._config_in(stage).states
        cut = None if shared is None else SharedBytes(torch.from_numpy(mapped(shared)))
        states = None if of_state is None else allocate(of_state, num_states, shared=cut)
        num_pages_beside, num_frames = self._sizes(num_pages)
        if drafter is None:
            memory = allocate(layout, num_frames, shared=cut)
            return _Made(memory=memory, storage=storage_for(layout, num_frames, memory=memory), states=states)
        joint = drafter.allocate(
            layout, num_pages_beside, num_frames=num_frames if self.has_frames else None, shared=cut
        )
        return _Made(memory=joint.whole, storage=joint.target, beside=joint.beside, joint=joint, states=states)

    def make_runner(
        self,
        *,
        max_length: int,
        processors: Mapping[str, Process] | None,
        watch: StepWatch | None = None,
        place: StagePlace | None = None,
    ) -> Runner:
        """Return what computes, after `compile` and `allocate`.

        Args:
            max_length: of a request.
            processors: functions that requests may name.
            watch: gets what each step has computed; None: the model is whole, or cut into stages.
            place: among the stages; None: there is one.
        """
        assert self._kernel is not None
        assert self._storage is not None
        assert self.memory is not None
        found = self._found
        own = self._runner = CPURunner(
            self.loaded.model,
            self._storage,
            self._kernel,
            max_rows=self._config.num_rows,
            max_length=max_length,
            num_threads=self._num_threads,
            make_lookup=None if found is None else LOOKUPS.get(found.kind),
            make_drafter=self._make_drafter,
            max_drafts=0 if found is None else self._config.speculative_num_tokens,
            drafts_ahead=place is not None and found is not None and found.kind in _OF_LAST_STAGE,
            processors=processors,
            groups=self.groups,
            exchange=self._exchange if self._config.enable_dp_attention else None,
            watch=watch if place is None else place.watch,
            adapters=self.adapters,
            states=self._states,
            images=self._images,
        )
        runner: Runner = own
        for one in (self.memory, self._beside):
            if one is not None:
                self._populators.append(Populator(one))
                runner = PopulatingRunner(runner, self._populators[-1], first=self._first_page(one))
        if place is None:
            return runner
        return StagedRunner(runner, own.learn, place.watch, place.memory, place.rank)

    def _first_page(self, memory: PageMemory) -> int | None:
        """Return the id of the first page in the memory of this rank; None: it has all pages, or its part of each."""
        by_request = self._config.enable_dp_attention
        return self.loaded.model.shard.rank * memory.num_pages if by_request else None

    def _measured_page(self) -> int:
        num_groups, drafter = len(self.groups.windows), self._drafter
        page_bytes = self.layout.bytes_per_page * num_groups
        if drafter is None:
            return page_bytes
        if not self.has_frames:
            return drafter.memory.layout(self.layout).bytes_per_page
        # A request that is long for its windows holds little but whole groups.
        return page_bytes + -(
            -drafter.memory.layout_beside(self.layout).bytes_per_page * num_groups // self.groups.windows.count(None)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """The KV memory of a rank."""

    memory: PageMemory
    storage: AnyStorage
    beside: PageMemory | None = None
    joint: JointMemory | None = None
    """With a drafter's; None: there is no drafter."""
    states: PageMemory | None = None


def _changes(config: EngineConfig, images: ImageUseOfModel | None) -> Callable[[ModelConfig], ModelConfig]:
    """Return what changes about the model of a folder."""
    change = expert_change(config)
    return change if images is None else lambda model: images.change(change(model))


def _joined(memories: Sequence[PageMemory]) -> PageMemory:
    return joined(JointLayout(parts=tuple(one.layout for one in memories)), memories)


def _described(variants: Collection[tuple[WeightKind, ProductLevel]]) -> str:
    """Return the forms of weights, and the instructions for products with rounded activations, as text for the log."""
    names = ", ".join(sorted({kind.name.lower().removesuffix("_pairs") for kind, _ in variants})) or "float32"
    products = {
        f"; products with {'int8' if isinstance(level, DotLevel) else 'bfloat16'} activations "
        f"by {level.name.replace('_', '-')}"
        for _, level in variants
        if not isinstance(level, WideLevel)
    }
    return names + "".join(sorted(products))


def _find_drafter(config: EngineConfig, folder: Path) -> FoundDrafter:
    """Return the drafter for the model, after its folder was compared with the target's."""
    assert config.speculative != "off"
    found = find_drafter(folder, config.speculative, speculative_model=config.speculative_model)
    if found.kind == "draft" and found.folder is not None:
        check_draft(found.folder, folder)
    _log.info("drafts: %s%s", found.kind, "" if found.folder is None else f" in {found.folder}")
    return found


def _head_of(found: FoundDrafter, folder: Path) -> HeadConfig | None:
    """Return the head that drafts for a model; None: a head does not."""
    if found.kind != "eagle" or found.folder is None:
        return None
    return HeadConfig.from_folder(found.folder, ModelConfig.from_folder(folder))


def _groups(config: EngineConfig, model: ModelConfig, *, has_drafter: bool) -> LayerGroups:
    """Return the groups of layers whose memory is given back apart."""
    whole = model.groups(max_length=1)  # one, in which layers may share the memory of others
    if config.enable_dp_attention or model.states is not None:  # a hit is measured by its state, not by its windows
        return whole
    groups = model.groups(max_length=min(config.max_length or model.max_position, model.max_position))
    if groups.windows == (None,):
        return groups
    reason = None
    if config.host_cache_gb is not None and config.decision_log is not None:
        reason = "a replay of the decision log would not know when copies to the host end"
    if config.host_cache_gb is not None and config.nnodes > 1:
        reason = "hosts copy whole pages"
    if has_drafter and None not in groups.windows:
        reason = "a drafter has its own of all of them"
    if reason is not None:
        _log.info("layers with a window keep the KV of all positions, because %s", reason)
        return whole
    num_whole = groups.windows.count(None)
    _log.info(
        "KV memory: %d groups of %d layers need all positions, %d groups the last %d",
        num_whole,
        groups.num_layers,
        len(groups.windows) - num_whole,
        groups.windows[-1],
    )
    return groups
