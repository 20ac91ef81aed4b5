"""Attention of one step over pages, one grant after the other, in plain torch; and the memory of caches for it.

Legend: T tokens of a step, G grants, N pages of all grants, n tokens of a grant, L positions that it may see, H query
heads, K KV heads, D size of a key, C size of a value.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from pagewood.engine.runner.cuda.attention import HostArrays, Places
from pagewood.engine.runner.transformers.interface import AttentionCall, MaskRule
from pagewood.kvpool.storage import KVStorage


class PagedStep:
    """The attention of one step, or the memory of its caches.

    Invariant: calls of `attend` are those of the layers in their order, each once.

    A token sees positions by a rule about its own position, so positions behind it, which a step that verifies may
    have pages for, are never seen.
    """

    __slots__ = (
        "_keys", "_layer", "_lengths", "_may_be_stale", "_places", "_seen", "_slots", "_spans", "_storage", "_targets",
        "_texts",
    )  # fmt: skip

    def __init__(self, storage: KVStorage, host: HostArrays, places: Places) -> None:
        """Find the places of the step's keys and values.

        Args:
            storage: the KV memory.
            host: what the host knows of the step.
            places: of its tokens.
        """
        page_size, device = storage.layout.page_size, places.positions.device
        offsets, first_pages, lengths = host.qo_indptr.tolist(), host.kv_indptr.tolist(), host.kv_lens.tolist()
        self._storage = storage
        self._places = places
        self._layer = 0  # written by: attend
        self._may_be_stale = places.is_finite is not None
        self._spans = [slice(*pair) for pair in pairwise(offsets)]
        self._lengths = lengths
        self._texts: Sequence[tuple[slice, int]] | None = None  # written by: texts
        within = torch.arange(page_size, dtype=torch.int32, device=device)
        slots = (places.kv_indices[:, None] * page_size + within).flatten()
        self._slots = [
            slots[first * page_size : first * page_size + length]
            for first, length in zip(first_pages, lengths, strict=False)
        ]
        """For each grant `[L]`, the slots of its positions."""
        pages = places.kv_indptr.index_select(0, places.grants) + places.positions // page_size
        self._targets = places.kv_indices.index_select(0, pages) * page_size + places.positions % page_size
        """[T], the slots of the step's own tokens."""
        self._keys = torch.arange(max(lengths), dtype=torch.int32, device=device)
        self._seen: dict[MaskRule, Sequence[Tensor]] = {}  # written by: _masks

    @property
    def positions(self) -> Tensor:
        """[T] int32, of the tokens."""
        return self._places.positions

    @property
    def texts(self) -> Sequence[tuple[slice, int]]:
        """For each grant, its tokens and the position of the first; waits for a device that alone knows it."""
        if self._texts is None:
            starts = [
                length - (span.stop - span.start) for length, span in zip(self._lengths, self._spans, strict=True)
            ]
            if self._may_be_stale:  # the host knows upper bounds
                positions = self.positions.tolist()
                starts = [positions[span.start] for span in self._spans]
            self._texts = list(zip(self._spans, starts, strict=True))
        return self._texts

    def extend(self, text: int, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of a grant in a layer, and return all of them; see `caches.TextStep`."""
        span, start = self.texts[text]
        self._store(layer, k, v, span)
        slots = self._slots[text][: start + span.stop - span.start]
        keys, values = self._storage.read(layer, slots, dtype=k.dtype)
        return keys[:, : len(k), : k.shape[2]].transpose(0, 1), values[:, : len(v), : v.shape[2]].transpose(0, 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        """Store the keys and values of a layer, and return its attention; see `interface.Step`."""
        layer, self._layer = self._layer, self._layer + 1
        (heads, _, key_size), value_size = k.shape, v.shape[-1]
        self._store(layer, k, v, slice(None))
        parts: list[Tensor] = []
        for span, slots, seen in zip(self._spans, self._slots, self._masks(call.rule), strict=True):
            keys, values = self._storage.read(layer, slots, dtype=q.dtype)
            if self._may_be_stale:  # zero times NaN is NaN
                unseen = ~seen.any(0)[:, None, None]
                keys, values = keys.masked_fill(unseen, 0.0), values.masked_fill(unseen, 0.0)
            past = keys[:, :heads, :key_size].transpose(0, 1), values[:, :heads, :value_size].transpose(0, 1)
            parts.append(_attention(q[:, span], *past, seen, call))
        return torch.cat(parts, 1).transpose(0, 1)

    def _store(self, layer: int, k: Tensor, v: Tensor, span: slice) -> None:
        """Store `k` `[K, n, D]` and `v` `[K, n, C]` of the tokens in `span`."""
        layout, finite = self._storage.layout, self._places.is_finite
        keys, values = (_widened(x.transpose(0, 1), layout.num_kv_heads, layout.head_dim) for x in (k, v))
        if finite is not None:
            is_finite = finite[span, :, None]
            keys, values = (torch.where(is_finite, x.nan_to_num(0.0, 0.0, 0.0), x) for x in (keys, values))
        self._storage.write(layer, keys, values, self._targets[span])

    def _masks(self, rule: MaskRule) -> Sequence[Tensor]:
        """Return for each grant which positions its tokens see, `[n, L] bool`."""
        if rule not in self._seen:
            self._seen[rule] = [
                rule.seen(self.positions[span], self._keys[: len(slots)])
                for span, slots in zip(self._spans, self._slots, strict=True)
            ]
        return self._seen[rule]


def _widened(x: Tensor, num_heads: int, size: int) -> Tensor:
    """Return `x` `[T, heads, size]` with zeros behind it, up to the heads and the size of the memory."""
    return functional.pad(x, (0, size - x.shape[2], 0, num_heads - x.shape[1]))


def _attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, call: AttentionCall) -> Tensor:
    """Return `[H, n, C]` from `q` `[H, n, D]`, `k` `[K, L, D]` and `v` `[K, L, C]`."""
    group = len(q) // len(k)
    if call.soft_cap is None and call.sinks is None:
        return functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=seen, scale=call.scale, enable_gqa=group > 1
        )[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = (q @ k.mT).float() * call.scale
    if call.soft_cap is not None:
        scores = call.soft_cap * torch.tanh(scores / call.soft_cap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if call.sinks is not None:
        scores = torch.cat([scores, call.sinks.float()[:, None, None].expand(*scores.shape[:2], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return weights.to(v.dtype) @ v


class PagedAttention:
    """Plans steps over the pages of a storage; what a runner needs of an attention without graphs."""

    __slots__ = ("_storage",)

    windows: Sequence[int] = ()
    """Windows for which a runner makes plans ahead: none, because rules need neither them nor masks."""
    mask_windows: Sequence[int] = ()
    """Windows for which it makes masks ahead."""

    def __init__(self, storage: KVStorage) -> None:
        """Attend over `storage`."""
        self._storage = storage

    def plan(self, host: HostArrays, places: Places, staging: object) -> PagedStep:
        """Return the attention of a step."""
        return PagedStep(self._storage, host, places)

    def plan_verify(self, host: HostArrays, places: Places, masks: object, staging: object) -> PagedStep:
        """Return the attention of a step whose tokens begin where only the device knows."""
        return PagedStep(self._storage, host, places)

    def num_empty_grants(self, num_tokens: int, num_grants: int) -> int:
        """Return 0: no step is padded."""
        return 0
