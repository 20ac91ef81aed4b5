"""Pages of sliding-window layers, which a request uses as a ring."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewood.kvpool.arrays import PageArray, check_at_least_one
from pagewood.kvpool.latent import LatentLayout
from pagewood.kvpool.layout import MultiHeadLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowedLayout:
    """Layers in which a token attends to the last `window` positions, itself among them, and to none before.

    Invariant: a request needs `pages_per_request` pages in such layers, however long it grows: a ring, in which
    position p lies in page number `(p // page_size) % pages_per_request`. What a step of at most `max_step` tokens
    overwrites is out of the window of every token of that step, so that it may write all its keys before it attends.

    Attributes:
        kv: What a page is.
        window: Positions that a token sees, >= 1.
        max_step: Tokens of one request in one step, >= 1.
    """

    kv: MultiHeadLayout | LatentLayout
    window: int
    max_step: int

    def __post_init__(self) -> None:
        check_at_least_one(window=self.window, max_step=self.max_step)

    @property
    def num_layers(self) -> int:
        """Sliding-window layers."""
        return self.kv.num_layers

    @property
    def page_size(self) -> int:
        """Token positions in a page."""
        return self.kv.page_size

    @property
    def arrays(self) -> tuple[PageArray, ...]:
        """What a page holds of each layer."""
        return self.kv.arrays

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers."""
        return self.kv.bytes_per_page

    @property
    def pages_per_request(self) -> int:
        """Pages of a ring: those that `window + max_step - 1` positions can touch, wherever they start."""
        return (self.window + self.max_step - 1 + self.page_size - 2) // self.page_size + 1

    def pages_for(self, num_bytes: int) -> int:
        """Return how many pages fit into `num_bytes`, counting all layers.

        Raises:
            ValueError: Not even one does.
        """
        return self.kv.pages_for(num_bytes)

    def slots(self, ring: NDArray[np.int32], positions: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return where positions of a request lie.

        Args:
            ring: `[pages_per_request] int32`, the request's pages.
            positions: `[n] int32`, each within the window of the last step.

        Returns:
            `[n] int32`, slots.
        """
        page, offset = np.divmod(positions, np.int32(self.page_size))
        return self._check_ring(ring)[page % len(ring)] * np.int32(self.page_size) + offset

    def visible(self, ring: NDArray[np.int32], num_tokens: int, *, num_new: int = 1) -> tuple[NDArray[np.int32], int]:
        """Return the pages that a step reads, as an attention kernel with a window wants them.

        Args:
            ring: `[pages_per_request] int32`, the request's pages.
            num_tokens: Tokens of the request, those of the step included, >= 1.
            num_new: Tokens of the step, in [1, min(max_step, num_tokens)].

        Returns:
            `[n] int32`, pages in the order of their positions, and the position of the first slot in the first of them.
            To a kernel, this is a request of `num_tokens` minus that position.
        """
        if not 1 <= num_new <= min(self.max_step, num_tokens):
            raise ValueError(f"num_new must be in [1, {min(self.max_step, num_tokens)}], got {num_new}")
        first_page = max(0, num_tokens - num_new - self.window + 1) // self.page_size
        pages = np.arange(first_page, (num_tokens - 1) // self.page_size + 1)
        return self._check_ring(ring)[pages % len(ring)], first_page * self.page_size

    def _check_ring(self, ring: NDArray[np.int32]) -> NDArray[np.int32]:
        if ring.shape != (self.pages_per_request,):
            raise ValueError(f"ring must have shape ({self.pages_per_request},), got {ring.shape}")
        return ring
