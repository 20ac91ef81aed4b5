"""Latent attention by FlashInfer: planned on the host once per step, run on the device once per layer.

Legend: T tokens of a step, H heads, N, R, V and C as in `models.ops.LatentShape`.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagewood.engine.models.ops import LatentShape, Norm
from pagewood.engine.models.parts.attention import AttentionConfig
from pagewood.engine.models.parts.latent_attention import LatentAttentionConfig
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


class CUDALatentHeads:
    """`models.ops.LatentHeads`; rotated elements of pairs stay pairs."""

    __slots__ = ("_flashinfer", "_heads", "_shape")

    def __init__(self, flashinfer: FlashInfer, weight: Tensor, shape: LatentShape) -> None:
        """Keep `weight` `[H (N + V), C]`."""
        self._flashinfer = flashinfer
        self._heads = weight
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
        absorbed = torch.bmm(plain.transpose(0, 1), self._matrices[:, : shape.plain_dim])
        queries = torch.cat([absorbed.transpose(0, 1), rotated.view(len(q), -1, shape.rope_dim)], dim=-1)
        return queries.flatten(1), x

    def values(self, attended: Tensor) -> Tensor:
        """Return the values of sums of latents."""
        sums = attended.view(len(attended), -1, self._shape.rank).transpose(0, 1)
        return torch.bmm(sums, self._matrices[:, self._shape.plain_dim :].transpose(1, 2)).transpose(0, 1).flatten(1)

    @property
    def _matrices(self) -> Tensor:
        return self._heads.view(self._shape.num_heads, -1, self._shape.rank)


class LatentKernels:
    """The wrapper. Invariant: all layers use the latest plan."""

    __slots__ = ("_layout", "_shape", "wrapper")

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
        self.wrapper: LatentWrapper = flashinfer.BatchMLAPagedAttentionWrapper(
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
        lend(self.wrapper, staging[_ALL])
        self.wrapper.plan(
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


class PlannedLatentAttention:
    """The attention of one step; satisfies `models.ops.Attention`."""

    __slots__ = ("_flashinfer", "_places", "_storage", "_wrapper")

    def __init__(self, flashinfer: FlashInfer, storage: LatentStorage, wrapper: LatentWrapper, places: Places) -> None:
        """Use a wrapper that is planned before `run` is called."""
        self._flashinfer = flashinfer
        self._storage = storage
        self._wrapper = wrapper
        self._places = places

    def run(self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: int, sinks: Tensor | None = None) -> Tensor:
        """Write latents `k` `[T, C + R]` to their pages in `layer`; return the attention `[T, H C]` of `q`."""
        assert k is not None
        assert v is None, "latents are values too"
        assert sinks is None
        layout, places, memory = self._storage.layout, self._places, self._storage.parts(layer)
        sizes = [layout.latent_dim, layout.rope_dim]
        self._flashinfer.append_paged_mla_kv_cache(
            k[:, : sizes[0]], k[:, sizes[0] :], places.grants, places.positions, memory[0], memory[1],
            places.kv_indices, places.kv_indptr, places.last_page_len,
        )  # fmt: skip
        plain, rotated = q.view(len(q), -1, sum(sizes)).split(sizes, dim=-1)
        return self._wrapper.run(plain, rotated, memory[0], memory[1]).flatten(1)


class FlashInferLatentAttention:
    """Causal attention over the latents of a `LatentStorage`, for the steps of one stream.

    Invariant: see `FlashInferAttention`.
    """

    __slots__ = ("_flashinfer", "_kernels", "_storage", "_workspace", "shape")

    def __init__(
        self,
        flashinfer: FlashInfer,
        storage: LatentStorage,
        layers: Sequence[LatentAttentionConfig],
        *,
        dtype: str,
        workspace_bytes: int | None = None,
    ) -> None:
        """Create the kernels for `storage`.

        Args:
            flashinfer: the module, or an object with the same functions.
            storage: the memory of latents.
            layers: the attention of each layer.
            dtype: of queries and results.
            workspace_bytes: size of the buffer for partial results; None means `WORKSPACE_BYTES`.

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
        self.shape = AttentionShape(
            windows=[None] * len(layers), heads={-1: heads}, groups=LayerGroups.whole(len(layers)), dtype=dtype
        )
        self._workspace = torch.zeros(
            WORKSPACE_BYTES if workspace_bytes is None else workspace_bytes, dtype=torch.uint8, device=storage.device
        )
        self._kernels = self._kernels_for(None)

    @property
    def windows(self) -> Sequence[int]:
        """The only window, of all positions."""
        return (_ALL,)

    def plan(self, host: HostArrays, places: Places, staging: Staging) -> PlannedLatentAttention:
        """Plan a step."""
        self._kernels.plan(host, places.kv_indices, staging)
        return self._over(self._kernels, places)

    def plan_verify(self, host: HostArrays, places: Places, masks: Masks, staging: Staging) -> PlannedLatentAttention:
        """Refuse, because the kernels have no masks; see `refuse_latents`."""
        raise NotImplementedError("FlashInfer's kernels for latents have no masks")

    def of_graph(self, memory: Places) -> tuple[LatentKernels, PlannedLatentAttention]:
        """Return kernels for steps of one token per grant, with exactly the number of grants of `memory`."""
        kernels = self._kernels_for(memory)
        return kernels, self._over(kernels, memory)

    def num_empty_grants(self, num_tokens: int, num_grants: int) -> int:
        """Return 0: no grant has to be added to a step."""
        return 0

    def _over(self, kernels: LatentKernels, places: Places) -> PlannedLatentAttention:
        return PlannedLatentAttention(self._flashinfer, self._storage, kernels.wrapper, places)

    def _kernels_for(self, memory: Places | None) -> LatentKernels:
        return LatentKernels(self._flashinfer, self._storage.layout, self.shape, self._workspace, memory)


AnyAttention = FlashInferAttention | FlashInferLatentAttention


def attention_over(
    flashinfer: FlashInfer,
    storage: AnyStorage,
    layers: Sequence[AttentionConfig | LatentAttentionConfig],
    *,
    dtype: str,
    batch_invariant: bool = False,
    verifies: bool = False,
    groups: LayerGroups | None = None,
) -> AnyAttention:
    """Return the attention of a model over its memory; see `FlashInferAttention`.

    Raises:
        ValueError: the memory does not hold what the layers need; or FlashInfer has no kernels for that.
    """
    heads = [layer for layer in layers if isinstance(layer, AttentionConfig)]
    latents = [layer for layer in layers if isinstance(layer, LatentAttentionConfig)]
    if isinstance(storage, KVStorage) and not latents:
        shape = AttentionShape.of(heads, dtype=dtype, groups=groups)
        return FlashInferAttention(flashinfer, storage, shape, batch_invariant=batch_invariant, verifies=verifies)
    if isinstance(storage, LatentStorage) and not heads:
        refuse_latents(batch_invariant=batch_invariant, verifies=verifies)
        return FlashInferLatentAttention(flashinfer, storage, latents, dtype=dtype)
    raise ValueError(
        f"memory must be a LatentStorage for layers of latents and a KVStorage for others, got a "
        f"{type(storage).__name__} for {len(latents)} layers of latents and {len(heads)} others"
    )


def refuse_latents(*, batch_invariant: bool, verifies: bool) -> None:
    """Check that an engine needs nothing that FlashInfer's kernels for latents lack.

    Raises:
        ValueError: it does.
    """
    if batch_invariant:
        raise ValueError(
            "batch_invariant must be False for a model with latent attention on CUDA, where FlashInfer splits latents "
            "by the whole step, got True"
        )
    if verifies:
        raise ValueError(
            "speculative must be off for a model with latent attention on CUDA, where FlashInfer's kernels have no "
            "masks"
        )
