"""The numbers of the attention of a model, by which it is planned and finds its memory."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewood.engine.models.memory import layer_groups
from pagewood.engine.models.parts.attention import AttentionConfig
from pagewood.kvpool import LayerGroups, MultiHeadLayout
from pagewood.kvpool.storage import KVStorage


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """The numbers of the heads of layers that are planned at once."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float | None = None
    """Multiplies the products of queries and keys; None means the usual one for the size of a head."""
    soft_cap: float | None = None

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def of(cls, layer: AttentionConfig) -> HeadShape:
        """Return the numbers of a layer."""
        return cls(
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            scale=layer.scale,
            soft_cap=layer.soft_cap,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The numbers that define the attention of a model. Invariant: there are heads for the window of every layer."""

    windows: Sequence[int | None]
    """Per layer, see `AttentionConfig.window`."""
    heads: Mapping[int, HeadShape]
    """By window, as in `windows_left`."""
    groups: LayerGroups
    """Groups of layers, each with page ids of its own."""
    dtype: str | None = None
    """Dtype of queries and results; None means that of the KV memory."""

    @classmethod
    def of(
        cls, layers: Sequence[AttentionConfig], *, dtype: str | None = None, groups: LayerGroups | None = None
    ) -> AttentionShape:
        """Return the shape of layers; those with the same window differ in nothing but sinks.

        Sequences must not be longer than a window that does not slide. Then it hides nothing. Without `groups`, all
        layers are one group.

        Raises:
            ValueError: they differ in something else.
        """
        windows = [None if layer.is_chunked else layer.window for layer in layers]
        heads: dict[int, HeadShape] = {}
        for layer, window in zip(layers, windows, strict=True):
            one, other = HeadShape.of(layer), heads.setdefault(_left(window), HeadShape.of(layer))
            if one != other:
                raise ValueError(
                    "layers with the same window must have the same heads, scale and soft cap on CUDA, where "
                    f"FlashInfer plans the attention of all at once, got {other} and {one}"
                )
        return cls(windows=windows, heads=heads, groups=groups or layer_groups(layers), dtype=dtype)

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The dtype as a torch dtype."""
        return None if self.dtype is None else getattr(torch, self.dtype)

    @property
    def windows_left(self) -> list[int]:
        """Per layer, how many earlier positions a token sees; -1 means all."""
        return [_left(window) for window in self.windows]

    @property
    def all_windows_left(self) -> list[int]:
        """The distinct values of `windows_left`, ascending."""
        return sorted(set(self.windows_left))

    def memories(self, storage: KVStorage) -> list[Tensor]:
        """Return the memory of each layer, `[pages, 2, P, K, D]`, in places that it may share with others."""
        layout = storage.layout
        places = zip(self.windows_left, self.groups.places, self.groups.starts, strict=True)
        return [
            _section(storage.layer(place), layout, self.heads[window], start) for window, (_, place), start in places
        ]


def _left(window: int | None) -> int:
    return -1 if window is None else window - 1


def _section(memory: Tensor, layout: MultiHeadLayout, heads: HeadShape, start: int) -> Tensor:
    """Return the section of every page that a layer has: behind `start` heads of the layout."""
    page_size, own = layout.page_size, heads.num_kv_heads * heads.head_dim
    if own == layout.num_kv_heads * layout.head_dim:
        return memory.view(-1, 2, page_size, heads.num_kv_heads, heads.head_dim)
    first = 2 * page_size * start * layout.head_dim
    section = memory.flatten(1)[:, first : first + 2 * page_size * own]
    return section.unflatten(1, (2, page_size, heads.num_kv_heads, heads.head_dim))
