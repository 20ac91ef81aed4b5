"""Paged attention by FlashInfer: planned on the host once per step and window, run on the device once per layer.

Legend: T tokens of a step, G grants, N pages of all grants, H query heads, K KV heads, D head_dim, P page_size.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.runner.cuda.attention_shape import AttentionShape
from pagewood.engine.runner.cuda.drafts.masks import Masks
from pagewood.engine.runner.cuda.kernels.flashinfer_api import DecodeWrapper, FlashInfer, LatentWrapper, PrefillWrapper
from pagewood.engine.runner.cuda.kernels.invariance import num_empty_grants
from pagewood.kvpool import MultiHeadLayout
from pagewood.kvpool.codes import encode
from pagewood.kvpool.storage import KVStorage

WORKSPACE_BYTES = 256 << 20
"""Size of the buffer for partial results of split grants; all wrappers of a stream share one."""
STAGING_BYTES = 8 << 20
"""Size of the pinned buffer from which a plan is copied to the device; the size that FlashInfer itself allocates."""
TENSOR_CORE_GROUP = 4  # query heads per KV head from which tensor cores are faster for a single token


@dataclass(frozen=True, slots=True, kw_only=True)
class PageArrays:
    """The pages that the grants of a step read, as host arrays. Every grant has at least one page."""

    kv_indptr: Int32
    """[G + 1], first page of each grant among all pages of the step."""
    last_page_len: Int32
    """[G], positions in the last page of each grant, in [1, page_size]."""

    @classmethod
    def of(cls, ends: Int32, *, page_size: int) -> PageArrays:
        """Return the arrays of grants that end before the positions `ends` `[G]`, each >= 1."""
        num_pages = (ends + (page_size - 1)) // page_size
        return cls(
            kv_indptr=offsets_of(num_pages),
            last_page_len=(ends - (num_pages - 1) * page_size).astype(np.int32),
        )


def offsets_of(counts: Int32) -> Int32:
    """Return `[G + 1] int32`: the sums of `counts` `[G]` before each element, and the total."""
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return offsets


@dataclass(frozen=True, slots=True, kw_only=True)
class HostArrays:
    """The arrays from which a step is planned, in pinned memory; all int32."""

    is_decode: bool
    """Whether every grant has one token."""
    qo_indptr: Tensor
    """[G + 1], first token of each grant."""
    kv_indptr: Tensor
    """[G + 1]"""
    last_page_len: Tensor
    """[G]"""
    kv_lens: Tensor
    """[G], positions that each grant sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The places of a step's tokens in KV memory, on the device; all int32."""

    grants: Tensor
    """[T], the grant of each token."""
    positions: Tensor
    """[T]"""
    kv_indptr: Tensor
    """[G + 1]"""
    kv_indices: Tensor
    """[N], page ids, those of frames in the first group of layers; the memory of a graph may be longer, but the rest is
    not read."""
    last_page_len: Tensor
    """[G]"""
    more_indices: tuple[Tensor, ...] = ()
    """[N] each, frames in the other groups of layers."""
    is_finite: Tensor | None = None
    """[T, 1] bool, tokens whose keys and values are stored as finite numbers, because a step that must not see them may
    still read them; None: no tokens."""

    def indices_of(self, group: int) -> Tensor:
        """Return the page ids in a group of layers."""
        return self.more_indices[group - 1] if group else self.kv_indices


Wrapper = DecodeWrapper | PrefillWrapper
Staging = Mapping[int, Tensor]
"""For each window, a pinned buffer of `STAGING_BYTES` that no plan in flight uses."""


class DecodeKernels:
    """The decode wrappers, one per window. Invariant: all layers use the latest plan."""

    __slots__ = ("_layout", "_shape", "by_window")

    def __init__(
        self,
        flashinfer: FlashInfer,
        layout: MultiHeadLayout,
        shape: AttentionShape,
        workspace: Tensor,
        graph: Places | None,
    ) -> None:
        """Create a wrapper for each window; with `graph`, they read their page arrays from its memory."""
        self._layout = layout
        self._shape = shape
        self.by_window: dict[int, DecodeWrapper] = {
            window: flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace,
                use_cuda_graph=graph is not None,
                use_tensor_cores=shape.heads[window].group >= TENSOR_CORE_GROUP,
                paged_kv_indptr_buffer=graph.kv_indptr if graph else None,
                paged_kv_indices_buffer=graph.kv_indices if graph else None,
                paged_kv_last_page_len_buffer=graph.last_page_len if graph else None,
            )
            for window in shape.all_windows_left
        }

    def plan(self, host: HostArrays, kv_indices: Tensor, staging: Staging) -> None:
        """Plan a step in which every grant has one token; wrappers of a graph copy the arrays to its memory."""
        kv_dtype = getattr(torch, self._layout.dtype)
        for window, wrapper in self.by_window.items():
            heads = self._shape.heads[window]
            lend(wrapper, staging[window])
            wrapper.plan(
                host.kv_indptr,
                kv_indices,
                host.last_page_len,
                heads.num_heads,
                heads.num_kv_heads,
                heads.head_dim,
                self._layout.page_size,
                window_left=window,
                logits_soft_cap=heads.soft_cap,
                sm_scale=heads.scale,
                q_data_type=self._shape.torch_dtype or kv_dtype,
                kv_data_type=kv_dtype,
                seq_lens=host.kv_lens,  # otherwise FlashInfer computes it
            )


class PrefillKernels:
    """The wrappers for any number of tokens, one per window. Invariant: all layers use the latest plan."""

    __slots__ = ("_batch_invariant", "_layout", "_shape", "by_window")

    def __init__(
        self,
        flashinfer: FlashInfer,
        layout: MultiHeadLayout,
        shape: AttentionShape,
        workspace: Tensor,
        graph: Places | None,
        *,
        batch_invariant: bool,
    ) -> None:
        """Create a wrapper for each window; with `graph`, steps must have one token per grant."""
        self._layout = layout
        self._shape = shape
        self._batch_invariant = batch_invariant
        self.by_window: dict[int, PrefillWrapper] = {
            window: flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                workspace,
                use_cuda_graph=graph is not None,
                qo_indptr_buf=torch.zeros_like(graph.kv_indptr) if graph else None,
                paged_kv_indptr_buf=graph.kv_indptr if graph else None,
                paged_kv_indices_buf=graph.kv_indices if graph else None,
                paged_kv_last_page_len_buf=graph.last_page_len if graph else None,
                backend="fa2" if batch_invariant else "auto",
            )
            for window in shape.all_windows_left
        }

    def plan(self, host: HostArrays, kv_indices: Tensor, staging: Staging) -> None:
        """Plan a step; wrappers of a graph copy the arrays to its memory."""
        kv_dtype = getattr(torch, self._layout.dtype)
        for window, wrapper in self.by_window.items():
            heads = self._shape.heads[window]
            lend(wrapper, staging[window])
            wrapper.plan(
                host.qo_indptr,
                host.kv_indptr,
                kv_indices,
                host.last_page_len,
                heads.num_heads,
                heads.num_kv_heads,
                heads.head_dim,
                self._layout.page_size,
                causal=True,
                window_left=window,
                logits_soft_cap=heads.soft_cap,
                sm_scale=heads.scale,
                q_data_type=self._shape.torch_dtype or kv_dtype,
                kv_data_type=kv_dtype,
                seq_lens=host.kv_lens,  # otherwise FlashInfer computes it in unpinned memory
                disable_split_kv=self._batch_invariant,
            )


class VerifyKernels:
    """The wrappers of steps whose masks are computed on the device. Invariant: all layers use the latest plan.

    A mask hides the positions after a token and those that have left its window. So kernels of all windows are planned
    without one: FlashInfer would count a window from the end of the planned positions, which may be too late.
    """

    __slots__ = ("_batch_invariant", "_has_graph", "_layout", "_shape", "by_window")

    def __init__(
        self,
        flashinfer: FlashInfer,
        layout: MultiHeadLayout,
        shape: AttentionShape,
        workspace: Tensor,
        graph: Places | None,
        masks: Masks | None,
        *,
        batch_invariant: bool,
    ) -> None:
        """Create a wrapper for each window; with `graph`, they read from its memory, and from that of `masks`."""
        self._layout = layout
        self._shape = shape
        self._batch_invariant = batch_invariant
        self._has_graph = graph is not None
        self.by_window: dict[int, PrefillWrapper] = {
            window: flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                workspace,
                use_cuda_graph=graph is not None,
                qo_indptr_buf=torch.zeros_like(graph.kv_indptr) if graph else None,
                paged_kv_indptr_buf=graph.kv_indptr if graph else None,
                paged_kv_indices_buf=graph.kv_indices if graph else None,
                paged_kv_last_page_len_buf=graph.last_page_len if graph else None,
                custom_mask_buf=masks.by_window[window] if masks else None,
                mask_indptr_buf=masks.offsets if masks else None,
                backend="fa2",  # the only backend with masks
            )
            for window in shape.all_windows_left
        }

    def plan(self, host: HostArrays, kv_indices: Tensor, masks: Masks, staging: Staging) -> None:
        """Plan a step; wrappers of a graph copy the page arrays to its memory, where the masks must be already.

        FlashInfer's `plan` also accepts packed masks, but it would treat offsets in bits as offsets in bytes, and copy
        them from memory that is not pinned. So the masks are set here.
        """
        kv_dtype = getattr(torch, self._layout.dtype)
        for window, wrapper in self.by_window.items():
            heads = self._shape.heads[window]
            lend(wrapper, staging[window])
            wrapper.plan(
                host.qo_indptr,
                host.kv_indptr,
                kv_indices,
                host.last_page_len,
                heads.num_heads,
                heads.num_kv_heads,
                heads.head_dim,
                self._layout.page_size,
                causal=True,
                window_left=-1,
                logits_soft_cap=heads.soft_cap,
                sm_scale=heads.scale,
                q_data_type=self._shape.torch_dtype or kv_dtype,
                kv_data_type=kv_dtype,
                seq_lens=host.kv_lens,
                disable_split_kv=self._batch_invariant,
            )
        if not self._has_graph:
            self.take(masks)

    def take(self, masks: Masks) -> None:
        """Use other masks for the planned step."""
        for window, wrapper in self.by_window.items():
            wrapper._custom_mask_buf = masks.by_window[window]
            wrapper._mask_indptr_buf = masks.offsets


Kernels = DecodeKernels | PrefillKernels


class AttentionPlanner(Protocol):
    """Plans the attention of steps. What it returns is handed to the model, which alone knows what to do with it."""

    @property
    def windows(self) -> Sequence[int]:
        """The windows for which steps bring staging: how many earlier positions a token sees; -1: all."""
        ...

    @property
    def mask_windows(self) -> Sequence[int]:
        """The windows for which steps that verify bring masks."""
        ...

    def plan(self, host: HostArrays, places: Places, staging: Staging) -> Any:
        """Return the attention of a step."""
        ...

    def plan_verify(self, host: HostArrays, places: Places, masks: Masks, staging: Staging) -> Any:
        """Return the attention of a step in which each token sees the positions in `masks`."""
        ...

    def num_empty_grants(self, num_tokens: int, num_grants: int) -> int:
        """Return how many empty grants must be added to a step without a graph."""
        ...


class PlannedAttention:
    """The attention of one step; satisfies `models.ops.Attention`."""

    __slots__ = ("_by_layer", "_flashinfer", "_memories", "_places", "_shape")

    def __init__(
        self,
        flashinfer: FlashInfer,
        memories: Sequence[Tensor],
        shape: AttentionShape,
        by_window: Mapping[int, Wrapper],
        places: Places,
    ) -> None:
        """Use wrappers that are planned before `run` is called, and the memory of each layer."""
        self._flashinfer = flashinfer
        self._memories = memories
        self._shape = shape
        self._by_layer = [by_window[window] for window in shape.windows_left]
        self._places = places

    def run(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: int,
        sinks: Tensor | None = None,
        biases: Tensor | None = None,
    ) -> Tensor:
        """Write `k` and `v` `[T, K * D]` to their pages in `layer`; return the attention `[T, H * D]` of `q`.

        The logarithm, to base 2, of the sum over a row's softmax says what share of it a sink leaves to the values.
        """
        assert biases is None, "of encoders, which no device computes"
        places, memory, num_tokens = self._places, self._memories[layer], q.shape[0]
        group, _ = self._shape.groups.places[layer]
        head_dim = memory.shape[-1]
        if k is not None and v is not None:
            self._store(k, v, layer)
        heads, wrapper = q.view(num_tokens, -1, head_dim), self._by_layer[layer]
        # A plan depends on how many pages there are, not on which. FlashInfer has no argument for others in `run`.
        planned = wrapper._paged_kv_indices_buf
        if group:
            wrapper._paged_kv_indices_buf = places.indices_of(group)
        if sinks is None:
            attended = wrapper.run(heads, memory)
        else:
            attended, logarithms = wrapper.run(heads, memory, return_lse=True)
            shares = torch.sigmoid(logarithms * math.log(2) - sinks.float())[..., None]
            attended = (attended * shares).to(q.dtype)
        wrapper._paged_kv_indices_buf = planned
        return attended.view(num_tokens, -1)

    def _store(self, k: Tensor, v: Tensor, layer: int) -> None:
        places, memory = self._places, self._memories[layer]
        kv_shape = (-1, *memory.shape[3:])
        if places.is_finite is not None:
            k, v = (torch.where(places.is_finite, x.nan_to_num(0.0, 0.0, 0.0), x) for x in (k, v))
        if k.dtype != memory.dtype:
            k, v = encode(k, memory.dtype), encode(v, memory.dtype)
        self._flashinfer.append_paged_kv_cache(
            k.view(kv_shape), v.view(kv_shape), places.grants, places.positions, memory,
            places.indices_of(self._shape.groups.places[layer][0]), places.kv_indptr, places.last_page_len,
        )  # fmt: skip


class FlashInferAttention:
    """Causal grouped-head attention over the pages of a `KVStorage`, for the steps of one stream.

    Invariant: steps of one stream share wrappers and workspace, because the device runs them in order. They must not
    share the pinned memory that a plan is copied from, so each step brings its own.
    """

    __slots__ = (
        "_batch_invariant", "_decode", "_flashinfer", "_memories", "_prefill", "_storage", "_verify", "_workspace",
        "shape",
    )  # fmt: skip

    def __init__(
        self,
        flashinfer: FlashInfer,
        storage: KVStorage,
        shape: AttentionShape,
        *,
        batch_invariant: bool = False,
        verifies: bool = False,
        workspace_bytes: int | None = None,
    ) -> None:
        """Create the kernels for `storage`, whose layout must have the order NHD.

        Args:
            flashinfer: the module, or an object with the same functions.
            storage: the KV memory.
            shape: the attention of the model.
            batch_invariant: whether all steps use the same kernels; see `invariance`.
            verifies: whether some steps have masks.
            workspace_bytes: size of the buffer for partial results; None means `WORKSPACE_BYTES`.

        Raises:
            ValueError: the layout has another order.
        """
        layout = storage.layout
        if layout.order != "NHD":
            raise ValueError(f"storage must have the layout NHD, got {layout.order}")
        self._flashinfer = flashinfer
        self._storage = storage
        self._memories = shape.memories(storage)
        self.shape = shape
        self._workspace = torch.zeros(
            WORKSPACE_BYTES if workspace_bytes is None else workspace_bytes, dtype=torch.uint8, device=storage.device
        )
        self._batch_invariant = batch_invariant
        self._prefill = PrefillKernels(
            flashinfer, layout, shape, self._workspace, None, batch_invariant=batch_invariant
        )
        self._decode: Kernels = (
            self._prefill if batch_invariant else DecodeKernels(flashinfer, layout, shape, self._workspace, None)
        )
        self._verify = self._verify_kernels(None, None) if verifies else None

    @property
    def layout(self) -> MultiHeadLayout:
        """The layout of the KV memory."""
        return self._storage.layout

    @property
    def windows(self) -> Sequence[int]:
        """The windows of all layers, each once."""
        return self.shape.all_windows_left

    @property
    def mask_windows(self) -> Sequence[int]:
        """The same."""
        return self.shape.all_windows_left

    def plan(self, host: HostArrays, places: Places, staging: Staging) -> PlannedAttention:
        """Plan a step, with the decode kernels if every grant has one token, otherwise with the prefill kernels."""
        kernels = self._decode if host.is_decode else self._prefill
        kernels.plan(host, places.kv_indices, staging)
        return self.over(kernels, places)

    def plan_verify(self, host: HostArrays, places: Places, masks: Masks, staging: Staging) -> PlannedAttention:
        """Plan a step in which each token sees the positions in `masks`."""
        assert self._verify is not None
        self._verify.plan(host, places.kv_indices, masks, staging)
        return self.over(self._verify, places)

    def replan_masks(self, places: Places, masks: Masks) -> PlannedAttention:
        """Return the attention of a step that differs from the one planned last only in `masks` and positions."""
        assert self._verify is not None
        self._verify.take(masks)
        return self.over(self._verify, places)

    def of_verify_graph(self, memory: Places, masks: Masks) -> tuple[VerifyKernels, PlannedAttention]:
        """Return kernels for steps with masks, with exactly the number of grants of `memory`."""
        kernels = self._verify_kernels(memory, masks)
        return kernels, self.over(kernels, memory)

    def of_graph(self, memory: Places) -> tuple[Kernels, PlannedAttention]:
        """Return kernels for steps of one token per grant, with exactly the number of grants of `memory`."""
        layout, arguments = self._storage.layout, (self.shape, self._workspace, memory)
        kernels = (
            PrefillKernels(self._flashinfer, layout, *arguments, batch_invariant=True)
            if self._batch_invariant
            else DecodeKernels(self._flashinfer, layout, *arguments)
        )
        return kernels, self.over(kernels, memory)

    def num_empty_grants(self, num_tokens: int, num_grants: int) -> int:
        """Return how many empty grants must be added to a step without a graph."""
        if not self._batch_invariant:
            return 0
        counts = (num_empty_grants(num_tokens, num_grants, heads.group) for heads in self.shape.heads.values())
        return max(counts, default=0)

    def _verify_kernels(self, memory: Places | None, masks: Masks | None) -> VerifyKernels:
        return VerifyKernels(
            self._flashinfer,
            self._storage.layout,
            self.shape,
            self._workspace,
            memory,
            masks,
            batch_invariant=self._batch_invariant,
        )

    def over(self, kernels: Kernels | VerifyKernels, places: Places) -> PlannedAttention:
        """Return the attention that a model calls: `kernels` for tokens at `places`."""
        return PlannedAttention(self._flashinfer, self._memories, self.shape, kernels.by_window, places)


def lend(wrapper: Wrapper | LatentWrapper, staging: Tensor) -> None:
    """Make the next plan of `wrapper` use `staging`.

    FlashInfer copies a plan to the device from one pinned buffer of the wrapper and does not wait for the copy, so the
    next plan would overwrite it. FlashInfer has no argument for another buffer, only this attribute.
    """
    wrapper._pin_memory_int_workspace_buffer = staging
