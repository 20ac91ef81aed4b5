"""The layout of sliding-window layers, whose pages a request uses as a ring."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewood.kvpool.arrays import PageArray, check_at_least_one
from pagewood.kvpool.latent import LatentLayout
from pagewood.kvpool.layout import MultiHeadLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowedLayout:
    """Layers in which a token attends only to the last `window` positions, including its own.

    Invariant: in such layers a request needs `pages_per_request` pages, however long it grows. They form a ring:
    position p is in page number `(p // page_size) % pages_per_request` of the ring. A step of at most `max_step` tokens
    overwrites only positions outside the windows of all its tokens, so it may write all its keys before it attends.

    Attributes:
        kv: The layout of a page.
        window: Positions that a token attends to, >= 1.
        max_step: Largest number of tokens of one request in one step, >= 1.
    """

    kv: MultiHeadLayout | LatentLayout
    window: int
    max_step: int

    def __post_init__(self) -> None:
        check_at_least_one(window=self.window, max_step=self.max_step)

    @property
    def num_layers(self) -> int:
        """Number of sliding-window layers."""
        return self.kv.num_layers

    @property
    def page_size(self) -> int:
        """Token positions in a page."""
        return self.kv.page_size

    @property
    def arrays(self) -> tuple[PageArray, ...]:
        """The arrays that a page holds for each layer."""
        return self.kv.arrays

    @property
    def bytes_per_page(self) -> int:
        """Size of one page over all layers, in bytes."""
        return self.kv.bytes_per_page

    @property
    def pages_per_request(self) -> int:
        """Pages in a ring: the most pages that `window + max_step - 1` consecutive positions can touch."""
        return (self.window + self.max_step - 1 + self.page_size - 2) // self.page_size + 1

    def pages_for(self, num_bytes: int) -> int:
        """Return the number of pages, with all layers, that fit into `num_bytes`.

        Raises:
            ValueError: `num_bytes` is less than one page.
        """
        return self.kv.pages_for(num_bytes)

    def slots(self, ring: NDArray[np.int32], positions: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the slots of some positions of a request.

        Args:
            ring: `[pages_per_request] int32`, the request's pages.
            positions: `[n] int32`, each within a window of the last step.

        Returns:
            `[n] int32`, slots.
        """
        page, offset = np.divmod(positions, np.int32(self.page_size))
        return self._check_ring(ring)[page % len(ring)] * np.int32(self.page_size) + offset

    def visible(self, ring: NDArray[np.int32], num_tokens: int, *, num_new: int = 1) -> tuple[NDArray[np.int32], int]:
        """Return the pages that a step reads, in the form that an attention kernel with a window expects.

        Args:
            ring: `[pages_per_request] int32`, the request's pages.
            num_tokens: Tokens of the request, including those of the step, >= 1.
            num_new: Tokens of the step, in [1, min(max_step, num_tokens)].

        Returns:
            `[n] int32`, the pages in the order of their positions, and the position of the first slot of the first
            page. The kernel sees a request whose length is `num_tokens` minus that position.

        Raises:
            ValueError: `num_new` is out of range, or `ring` has the wrong shape.
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
