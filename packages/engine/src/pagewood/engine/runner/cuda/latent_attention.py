"""Latent attention: by FlashInfer, planned on the host once per step, or in pieces, where its kernels lack something.

FlashInfer divides latents by the whole step, and has no masks. So steps of batch-invariant mode and steps that verify
are computed in pieces of our own (`latents`), in which every token finds its own end.

Legend: T tokens of a step, H heads, N, R, V and C as in `models.ops.LatentShape`.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pagewood.engine.models.memory import layer_groups
from pagewood.engine.models.ops import LatentShape, Norm
from pagewood.engine.models.parts.attention import AttentionConfig
from pagewood.engine.models.parts.choice import AnyMixer, paged_part
from pagewood.engine.models.parts.latent_attention import LatentAttentionConfig
from pagewood.engine.runner.cuda import latents
from pagewood.engine.runner.cuda.attention import (
    WORKSPACE_BYTES,
    FlashInferAttention,
    HostArrays,
    Places,
    Staging,
    lend,
)
from pagewood.engine.runner.cuda.attention_shape import AttentionShape, HeadShape
from pagewood.engine.runner.cuda.drafts.masks import Masks
from pagewood.engine.runner.cuda.kernels.flashinfer_api import FlashInfer, LatentWrapper
from pagewood.engine.runner.storage import AnyStorage
from pagewood.kvpool import LatentLayout, LayerGroups
from pagewood.kvpool.latent_storage import LatentStorage
from pagewood.kvpool.storage import KVStorage

_ALL = -1  # FlashInfer's word for a window of all positions, and so the name of the only staging buffer

MultiplyHeads = Callable[[Tensor, Tensor], Tensor]
"""(x `[T, H, in]`, weight `[H, out, in]`) -> `[T, H, out]`; both may be views."""


def multiply_heads(x: Tensor, weight: Tensor) -> Tensor:
    """Return the products of each head with its matrix, see `MultiplyHeads`, by torch."""
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)


class CUDALatentHeads:
    """`models.ops.LatentHeads`; rotated elements of pairs stay pairs."""

    __slots__ = ("_flashinfer", "_heads", "_multiply", "_shape")

    def __init__(
        self, flashinfer: FlashInfer, weight: Tensor, shape: LatentShape, multiply: MultiplyHeads = multiply_heads
    ) -> None:
        """Keep `weight` `[H (N + V), C]`."""
        self._flashinfer = flashinfer
        self._heads = weight
        self._multiply = multiply
        self._shape = shape

    def absorb(self, q: Tensor, x: Tensor, rotation: tuple[Tensor, Tensor], norm: Norm) -> tuple[Tensor, Tensor]:
        """Return absorbed queries, and latents, in the memory of `x`."""
        shape, (positions, table) = self._shape, rotation
        plain, rotated = q.view(-1, shape.num_heads, shape.plain_dim + shape.rope_dim).split(
            [shape.plain_dim, shape.rope_dim], dim=-1
        )
        rotated = rotated.flatten(1)  # in memory of its own
        compressed, key = x.split([shape.rank, shape.rope_dim], dim=-1)
        assert norm.weight is not None
        self._flashinfer.rmsnorm(compressed, norm.weight, norm.epsilon, out=compressed)
        self._flashinfer.apply_rope_with_cos_sin_cache_inplace(
            positions, rotated, key, shape.rope_dim, table, is_neox=not shape.has_pairs
        )
        absorbed = self._multiply(plain, self._matrices[:, : shape.plain_dim].transpose(1, 2))
        queries = torch.cat([absorbed, rotated.view(len(q), -1, shape.rope_dim)], dim=-1)
        return queries.flatten(1), x

    def values(self, attended: Tensor) -> Tensor:
        """Return the values of sums of latents."""
        sums = attended.view(len(attended), -1, self._shape.rank)
        return self._multiply(sums, self._matrices[:, self._shape.plain_dim :]).flatten(1)

    @property
    def _matrices(self) -> Tensor:
        return self._heads.view(self._shape.num_heads, -1, self._shape.rank)


class LatentKernels(Protocol):
    """The kernels of one or several steps. Invariant: all layers use the latest plan."""

    def plan(self, host: HostArrays, kv_indices: Tensor, staging: Staging) -> None:
        """Plan a step; kernels of a graph copy the arrays to its memory."""
        ...

    def run(self, q: Tensor, memory: Tensor, places: Places) -> Tensor:
        """Return the attention `[T, H, C]` of `q` `[T, H, C + R]` over a layer `[pages, P, C + R]`."""
        ...


class FlashInferLatents:
    """FlashInfer's wrapper."""

    __slots__ = ("_layout", "_shape", "_wrapper")

    def __init__(
        self,
        flashinfer: FlashInfer,
        layout: LatentLayout,
        shape: AttentionShape,
        workspace: Tensor,
        graph: Places | None,
    ) -> None:
        """Create the wrapper; with `graph`, it reads its page arrays from its memory."""
        self._layout = layout
        self._shape = shape
        self._wrapper: LatentWrapper = flashinfer.BatchMLAPagedAttentionWrapper(
            workspace,
            use_cuda_graph=graph is not None,
            qo_indptr=torch.zeros_like(graph.kv_indptr) if graph else None,
            kv_indptr=graph.kv_indptr if graph else None,
            kv_indices=graph.kv_indices if graph else None,
            kv_len_arr=torch.zeros_like(graph.last_page_len) if graph else None,
        )

    def plan(self, host: HostArrays, kv_indices: Tensor, staging: Staging) -> None:
        """Plan a step; the wrapper of a graph copies the arrays to its memory."""
        layout, dtype = self._layout, getattr(torch, self._layout.dtype)
        heads = self._shape.heads[-1]
        scale = heads.scale
        assert scale is not None
        lend(self._wrapper, staging[_ALL])
        self._wrapper.plan(
            host.qo_indptr,
            host.kv_indptr,
            kv_indices,
            host.kv_lens,
            heads.num_heads,
            layout.latent_dim,
            layout.rope_dim,
            layout.page_size,
            True,
            scale,
            self._shape.torch_dtype or dtype,
            dtype,
        )

    def run(self, q: Tensor, memory: Tensor, places: Places) -> Tensor:
        """Return the attention of `q`, which the wrapper takes in two parts, as the latents."""
        sizes = [self._layout.latent_dim, self._layout.rope_dim]
        return self._wrapper.run(*q.split(sizes, dim=-1), *memory.split(sizes, dim=-1))


class LatentPieces:
    """Kernels in pieces, which need no plan but the length of the longest context."""

    __slots__ = ("_attend", "_graph", "_longest", "_rank", "_scale", "_workspace")

    def __init__(self, attention: LatentsInPieces, graph: tuple[Places, int] | None) -> None:
        """Attend as `attention`; with `graph`, read the page arrays from its memory, for contexts of a given length."""
        self._attend = attention.attend
        self._rank, self._scale, self._workspace = attention.rank, attention.scale, attention.workspace
        self._graph = None if graph is None else graph[0]
        self._longest = 0 if graph is None else graph[1]  # written by: plan

    def plan(self, host: HostArrays, kv_indices: Tensor, staging: Staging) -> None:
        """Take the longest context of a step; or copy the arrays to the memory of the graph."""
        if self._graph is None:
            self._longest = int(host.kv_lens.numpy().max())
            return
        self._graph.kv_indptr.copy_(host.kv_indptr, non_blocking=True)
        self._graph.kv_indices[: len(kv_indices)].copy_(kv_indices)

    def run(self, q: Tensor, memory: Tensor, places: Places) -> Tensor:
        """Return the attention of `q`, each token of which sees the positions up to its own."""
        return self._attend(
            q, memory, places, rank=self._rank, scale=self._scale, longest=self._longest, workspace=self._workspace
        )


class VerifyPieces:
    """`LatentPieces` for steps that have masks, which it ignores."""

    __slots__ = ("_pieces",)

    def __init__(self, pieces: LatentPieces) -> None:
        self._pieces = pieces

    def plan(self, host: HostArrays, kv_indices: Tensor, masks: Masks, staging: Staging) -> None:
        """Plan a step; see `LatentPieces.plan`."""
        self._pieces.plan(host, kv_indices, staging)

    def run(self, q: Tensor, memory: Tensor, places: Places) -> Tensor:
        """Return the attention of `q`."""
        return self._pieces.run(q, memory, places)


class LatentsInPieces:
    """The function that attends in pieces, with its numbers and the memory that all steps of a stream share."""

    __slots__ = ("attend", "max_length", "rank", "scale", "workspace")

    def __init__(self, storage: LatentStorage, layer: LatentAttentionConfig, *, max_length: int) -> None:
        """Allocate memory for tokens with contexts of up to `max_length` positions: for at least one token."""
        self.attend = latents.kernel_for(storage.device)
        self.rank, self.scale, self.max_length = layer.shape.rank, layer.scale, max_length
        least = latents.numbers_of_token(layer.shape.num_heads, self.rank, max_length)
        self.workspace = torch.empty(
            max(least, latents.WORKSPACE_BYTES // 4), dtype=torch.float32, device=storage.device
        )


class PlannedLatentAttention:
    """The attention of one step; satisfies `models.ops.Attention`."""

    __slots__ = ("_flashinfer", "_groups", "_kernels", "_places", "_storage")

    def __init__(
        self,
        flashinfer: FlashInfer,
        storage: LatentStorage,
        groups: LayerGroups,
        kernels: LatentKernels | VerifyPieces,
        places: Places,
    ) -> None:
        """Use kernels that are planned before `run` is called, and the place of each layer in its group."""
        self._groups = groups
        self._flashinfer = flashinfer
        self._storage = storage
        self._kernels = kernels
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
        """Write latents `k` `[T, C + R]` to their pages in `layer`; return the attention `[T, H C]` of `q`."""
        assert k is not None
        assert v is None, "latents are values too"
        assert sinks is None
        assert biases is None
        _, number = self._groups.places[layer]
        layout, places, parts = self._storage.layout, self._places, self._storage.parts(number)
        if places.is_finite is not None:
            k = torch.where(places.is_finite, k.nan_to_num(0.0, 0.0, 0.0), k)
        self._flashinfer.append_paged_mla_kv_cache(
            k[:, : layout.latent_dim], k[:, layout.latent_dim :], places.grants, places.positions, *parts,
            places.kv_indices, places.kv_indptr, places.last_page_len,
        )  # fmt: skip
        queries = q.view(len(q), -1, layout.latent_dim + layout.rope_dim)
        return self._kernels.run(queries, self._storage.layer(number), places).flatten(1)


class PagedLatentAttention:
    """Causal attention over the latents of a `LatentStorage`, for the steps of one stream.

    Invariant: see `FlashInferAttention`.
    """

    __slots__ = ("_flashinfer", "_flashinfer_workspace", "_kernels", "_pieces", "_storage", "_verify", "shape")

    def __init__(
        self,
        flashinfer: FlashInfer,
        storage: LatentStorage,
        layers: Sequence[LatentAttentionConfig],
        groups: LayerGroups,
        *,
        dtype: str,
        max_length: int,
        batch_invariant: bool = False,
        verifies: bool = False,
    ) -> None:
        """Create the kernels for `storage`.

        Args:
            flashinfer: the module, or an object with the same functions.
            storage: the memory of latents.
            layers: the attention of each layer.
            groups: of the layers: one, in which a layer has a place in the memory.
            dtype: of queries and results.
            max_length: longest sequence.
            batch_invariant: whether all steps are computed in pieces; see `invariance`.
            verifies: whether some steps have masks.

        Raises:
            ValueError: layers differ, or latents have another dtype than queries.
        """
        if len({(layer.shape, layer.scale) for layer in layers}) > 1:
            raise ValueError("layers must have the same shape and scale on CUDA, where the attention of all is planned")
        if storage.layout.dtype != dtype:
            raise ValueError(f"latents must have the dtype of queries, {dtype}, on CUDA, got {storage.layout.dtype}")
        self._flashinfer = flashinfer
        self._storage = storage
        own = layers[0].shape
        heads = HeadShape(num_heads=own.num_heads, num_kv_heads=1, head_dim=own.latent_size, scale=layers[0].scale)
        self.shape = AttentionShape(windows=[None] * len(layers), heads={-1: heads}, groups=groups, dtype=dtype)
        self._pieces = (
            LatentsInPieces(storage, layers[0], max_length=max_length) if batch_invariant or verifies else None
        )
        self._flashinfer_workspace = (
            None if batch_invariant else torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=storage.device)
        )
        self._kernels = self._kernels_for(None)
        self._verify = VerifyPieces(LatentPieces(self._pieces, None)) if self._pieces is not None else None

    @property
    def layout(self) -> LatentLayout:
        """The layout of the memory."""
        return self._storage.layout

    @property
    def windows(self) -> Sequence[int]:
        """The only window, of all positions, if FlashInfer plans for it."""
        return () if self._flashinfer_workspace is None else (_ALL,)

    @property
    def mask_windows(self) -> Sequence[int]:
        """None: tokens find their own ends."""
        return ()

    def plan(self, host: HostArrays, places: Places, staging: Staging) -> PlannedLatentAttention:
        """Plan a step."""
        self._kernels.plan(host, places.kv_indices, staging)
        return self.over(self._kernels, places)

    def plan_verify(self, host: HostArrays, places: Places, masks: Masks, staging: Staging) -> PlannedLatentAttention:
        """Plan a step in which only the device knows where tokens are."""
        assert self._verify is not None
        self._verify.plan(host, places.kv_indices, masks, staging)
        return self.over(self._verify, places)

    def replan_masks(self, places: Places, masks: Masks) -> PlannedLatentAttention:
        """Return the attention of a step that differs from the one planned last only in positions."""
        assert self._verify is not None
        return self.over(self._verify, places)

    def of_graph(self, memory: Places) -> tuple[LatentKernels, PlannedLatentAttention]:
        """Return kernels for steps of one token per grant, with exactly the number of grants of `memory`."""
        kernels = self._kernels_for(memory)
        return kernels, self.over(kernels, memory)

    def of_verify_graph(self, memory: Places, masks: Masks) -> tuple[VerifyPieces, PlannedLatentAttention]:
        """Return kernels for steps with masks, with exactly the number of grants of `memory`."""
        assert self._pieces is not None
        kernels = VerifyPieces(LatentPieces(self._pieces, (memory, self._pieces.max_length)))
        return kernels, self.over(kernels, memory)

    def num_empty_grants(self, num_tokens: int, num_grants: int) -> int:
        """Return 0: no grant has to be added to a step."""
        return 0

    def over(self, kernels: LatentKernels | VerifyPieces, places: Places) -> PlannedLatentAttention:
        """Return the attention that a model calls: `kernels` for tokens at `places`."""
        return PlannedLatentAttention(self._flashinfer, self._storage, self.shape.groups, kernels, places)

    def _kernels_for(self, memory: Places | None) -> LatentKernels:
        workspace, pieces = self._flashinfer_workspace, self._pieces
        if workspace is not None:
            return FlashInferLatents(self._flashinfer, self._storage.layout, self.shape, workspace, memory)
        assert pieces is not None
        return LatentPieces(pieces, None if memory is None else (memory, pieces.max_length))


AnyAttention = FlashInferAttention | PagedLatentAttention


def attention_over(
    flashinfer: FlashInfer,
    storage: AnyStorage,
    layers: Sequence[AnyMixer],
    *,
    dtype: str,
    max_length: int,
    batch_invariant: bool = False,
    verifies: bool = False,
    groups: LayerGroups | None = None,
) -> AnyAttention:
    """Return the attention of a model over its memory; see `FlashInferAttention` and `PagedLatentAttention`.

    Layers without pages stand in the place of the first one with pages, see `models.memory.layer_groups`. If none has
    pages, nothing is planned.

    Raises:
        ValueError: the memory does not hold what the layers need; or FlashInfer has no kernels for that.
    """
    paged = [paged_part(layer) for layer in layers]
    first, groups = next((layer for layer in paged if layer is not None), None), groups or layer_groups(layers)
    own = [] if first is None else [layer or first for layer in paged]
    heads = [layer for layer in own if isinstance(layer, AttentionConfig)]
    latent = [layer for layer in own if isinstance(layer, LatentAttentionConfig)]
    if isinstance(storage, KVStorage) and not latent:
        shape = AttentionShape.of(heads, dtype=dtype, groups=groups if heads else groups.shared([]))
        return FlashInferAttention(
            flashinfer, storage, shape, batch_invariant=batch_invariant, verifies=verifies,
            workspace_bytes=None if heads else 0,
        )  # fmt: skip
    if isinstance(storage, LatentStorage) and not heads:
        return PagedLatentAttention(
            flashinfer, storage, latent, groups, dtype=dtype, max_length=max_length, batch_invariant=batch_invariant,
            verifies=verifies,
        )  # fmt: skip
    raise ValueError(
        f"memory must be a LatentStorage for layers of latents and a KVStorage for others, got a "
        f"{type(storage).__name__} for {len(latent)} layers of latents and {len(heads)} others"
    )
