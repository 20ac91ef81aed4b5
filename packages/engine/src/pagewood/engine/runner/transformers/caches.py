"""Caches of `transformers` whose memory is pages: for modules that attend by themselves over what a cache returns.

Legend: n tokens of a text in a step, L positions up to the last of them, K KV heads, D size of a key, C size of a
value.
"""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class TextStep(Protocol):
    """Gets what the layers of one text after the other add to their caches."""

    @property
    def texts(self) -> Sequence[tuple[slice, int]]:
        """For each text, its tokens in the step, and the position of the first of them."""
        ...

    def extend(self, text: int, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys `[K, n, D]` and values `[K, n, C]` of a text; return `[K, L, D]` and `[K, L, C]`."""
        ...


class PagedLayer:
    """The cache of one layer of a text. Invariant: it holds all positions up to its length, and never drops any."""

    __slots__ = ("_indexer", "_layer", "_length", "_num_tokens", "_step", "_text")

    is_compileable = False
    is_croppable = False
    is_initialized = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, step: TextStep, text: int, layer: int, indexer: int) -> None:
        """Hold the positions of a text before the step.

        Args:
            step: with the memory.
            text: of the step.
            layer: of the memory, for keys and values.
            indexer: layer of the memory for the keys of an indexer, which chooses positions, if the layer has one.
        """
        tokens, start = step.texts[text]
        self._step = step
        self._text = text
        self._layer = layer
        self._indexer = indexer
        self._length = start  # written by: update
        self._num_tokens = tokens.stop - tokens.start

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_others: Any) -> tuple[Tensor, Tensor]:
        """Store what the step adds, `[1, K, n, D]` and `[1, K, n, C]`, and return all.

        Raises:
            ValueError: they have another shape.
        """
        self._length += self._num_tokens
        return self._extended(self._layer, key_states, value_states)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Store the keys `[1, n, D]` that an indexer adds, and return all.

        Raises:
            ValueError: they have another shape.
        """
        keys = indexer_key_states[:, None]
        return self._extended(self._indexer, keys, keys[..., :0])[0][:, 0]

    def update_index(self, idx_k: Tensor) -> Tensor:
        """Do the same with keys `[1, 1, n, D]`, for classes that call it so."""
        return self.update_indexer(idx_k[:, 0])[:, None]

    def _extended(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        for name, x in (("keys", k), ("values", v)):
            if x.ndim != 4 or len(x) != 1 or x.shape[2] != self._num_tokens:
                raise ValueError(
                    f"{name} of a cache must have the shape [1, heads, {self._num_tokens} tokens, size], got "
                    f"{list(x.shape)}"
                )
        keys, values = self._step.extend(self._text, layer, k[0], v[0])
        return keys[None], values[None]

    def get_seq_length(self) -> int:
        """Return the number of positions that it holds."""
        return self._length

    def get_max_length(self) -> int:
        """Return -1: it has no limit of its own."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many positions a mask for `query_length` new tokens has, and the first of them."""
        return self._length + query_length, 0


CacheLayerMixin.register(PagedLayer)


def cache_of(step: TextStep, text: int, num_layers: int) -> Cache:
    """Return the cache of a text, for one step."""
    layers: list[Any] = [PagedLayer(step, text, layer, num_layers + layer) for layer in range(num_layers)]
    return Cache(layers=layers)
