"""Paged attention on a CPU, written to the tape once a layer; `compiled.layout` plans it once a step.

Legend: T tokens of a scope, Q and K elements of all query and key heads of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pagewood.engine.models.memory import layer_groups
from pagewood.engine.models.parts.attention import AttentionConfig
from pagewood.engine.models.parts.choice import AnyMixer, paged_part
from pagewood.engine.models.parts.latent_attention import LatentAttentionConfig
from pagewood.engine.runner.cpu.compiled.attention.heads import attend, store
from pagewood.engine.runner.cpu.program.latent_attention import CPULatentAttention
from pagewood.engine.runner.cpu.program.tape import Buffer
from pagewood.kvpool import LayerGroups
from pagewood.kvpool.latent_storage import LatentStorage
from pagewood.kvpool.storage import KVStorage

_UNLIMITED = 1 << 40  # a window that no sequence fills
_TILE_ROWS = 192  # query rows of an item: copying a block of keys costs little beside them


class CPUAttention:
    """Grouped-head attention over the pages of a `KVStorage`."""

    __slots__ = ("_layers", "_pages", "_storage", "num_kv_heads", "tile")

    def __init__(
        self,
        storage: KVStorage,
        layers: Sequence[AnyMixer],
        *,
        groups: LayerGroups | None = None,
        num_rows: int = 0,
    ) -> None:
        """Attend over `storage`, whose layout must have the order HND, in float32 or int8.

        Args:
            storage: the KV memory.
            layers: the mixer of each layer; those without pages do not attend.
            groups: of the layers, each with a page table of its own; None: all layers are one group.
            num_rows: rows of the page table of a group.

        Raises:
            ValueError: the layout is a different one.
        """
        layout = storage.layout
        if layout.order != "HND" or layout.dtype not in ("float32", "int8"):
            raise ValueError(
                f"storage must have the layout HND in float32 or int8, got {layout.order} in {layout.dtype}"
            )
        self._storage = storage
        self._layers = [paged_part(layer) for layer in layers]
        groups = groups or layer_groups(layers)
        self._pages = [
            _pages_of(storage, number, start=start, first_row=group * num_rows)
            for (group, number), start in zip(groups.places, groups.starts, strict=True)
        ]
        heads = [layer for layer in self._layers if isinstance(layer, AttentionConfig)]
        self.num_kv_heads = max((layer.num_kv_heads for layer in heads), default=1)
        """Most key heads of a layer."""
        self.tile = max(1, _TILE_ROWS // max((layer.group for layer in heads), default=1))
        """Query tokens of an item of work."""

    def run(
        self,
        q: Buffer,
        k: Buffer | None,
        v: Buffer | None,
        layer: int,
        sinks: Tensor | None = None,
        biases: Tensor | None = None,
    ) -> Buffer:
        """Write `k` and `v` `[T, K]` to their pages in `layer` and return `[T, Q]`, what `q` `[T, Q]` attends to.

        Positions and pages are those of the scope of `q`. For `sinks` and `biases` see `models.ops.Attention`.
        """
        pages, tape, own, scope = self._pages[layer], q.tape, self._layers[layer], q.rows.scope
        assert isinstance(own, AttentionConfig)
        out = tape.buffer(q.rows, q.size)
        if k is not None:
            tape.write(
                store, q.rows, scope=scope, k=k, v=v, memory=pages.memory, scales=pages.scales,
                first_row=pages.first_row, size=k.size, kv_heads=own.num_kv_heads,
                page_size=self._storage.layout.page_size, stride=pages.stride, scale_stride=pages.scale_stride,
            )  # fmt: skip
        kind = attend(
            own.head_dim, int8=pages.scales is not None, sees_later=own.sees_later, sees_images=own.sees_images
        )
        tape.write(
            kind, q.rows, scope=scope, q=q, memory=pages.memory,
            scales=pages.scales, first_row=pages.first_row, out=out, size=q.size, kv_heads=own.num_kv_heads,
            page_size=self._storage.layout.page_size, stride=pages.stride, scale_stride=pages.scale_stride,
            window=_window(own), scale=own.scale,
            sinks=_numbers(sinks), biases=_numbers(None if biases is None else biases.T),
            soft_cap=own.soft_cap or 0.0,
        )  # fmt: skip
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pages:
    """The sections of pages that a layer has; see `compiled.attention.pages`."""

    memory: NDArray[np.generic]
    scales: NDArray[np.float32] | None
    stride: int
    scale_stride: int
    first_row: int
    """First row of its page table."""


def _pages_of(storage: KVStorage, number: int, *, start: int, first_row: int) -> _Pages:
    """Return the pages of a layer whose place is `number`, behind `start` heads of the layout."""
    layout = storage.layout
    heads, scale_stride = 2 * start * layout.page_size, 2 * layout.num_kv_heads * layout.page_size
    scales = storage.scales(number).view(-1).numpy()[heads:] if layout.dtype == "int8" else None
    return _Pages(
        memory=storage.layer(number).view(-1).numpy()[heads * layout.head_dim :],
        scales=scales,
        stride=scale_stride * layout.head_dim,
        scale_stride=scale_stride,
        first_row=first_row,
    )


def _numbers(parameter: Tensor | None) -> NDArray[np.float32] | None:
    return None if parameter is None else np.ascontiguousarray(parameter.numpy(), np.float32)


def _window(layer: AttentionConfig) -> int:
    """Return the window of a layer as the kernels take it; see `compiled.attention.pages`."""
    if layer.sees_later:
        return _UNLIMITED if layer.reach is None else layer.reach
    if layer.window is None:
        return _UNLIMITED
    return -layer.window if layer.is_chunked else layer.window


AnyCPUAttention = CPUAttention | CPULatentAttention


def attention_over(
    storage: KVStorage | LatentStorage,
    layers: Sequence[AnyMixer],
    *,
    groups: LayerGroups | None = None,
    num_rows: int = 0,
) -> AnyCPUAttention:
    """Return the attention of a model over its memory; see `CPUAttention`.

    Raises:
        ValueError: the memory does not hold what the layers need, or has a layout that is not supported.
    """
    paged = [paged_part(layer) for layer in layers]
    heads = [layer for layer in paged if isinstance(layer, AttentionConfig)]
    latents = {index: layer for index, layer in enumerate(paged) if isinstance(layer, LatentAttentionConfig)}
    if isinstance(storage, KVStorage) and not latents:
        return CPUAttention(storage, layers, groups=groups, num_rows=num_rows)
    if isinstance(storage, LatentStorage) and not heads:
        return CPULatentAttention(storage, latents)
    raise ValueError(
        f"memory must be a LatentStorage for layers of latents and a KVStorage for others, got a "
        f"{type(storage).__name__} for {len(latents)} layers of latents and {len(heads)} others"
    )
