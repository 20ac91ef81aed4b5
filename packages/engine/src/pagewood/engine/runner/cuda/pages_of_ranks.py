"""The KV memory of all ranks on devices as that of one pool, for the tiers below it.

Images of pages lie in memory of the host that all ranks share: each copies its own part of an image, when rank 0 says
which. So a page is there when all parts are, and what lies below the host sees whole images.
"""

# pyright: basic
# torch.distributed has no types.

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch

from pagewood.engine.runner.cuda.exchange import EndReason, GroupPlace, typed_errors
from pagewood.kvpool.tiers.pages.arrays import Bytes
from pagewood.kvpool.tiers.pages.device import DevicePages

_log = logging.getLogger(__name__)

_READ, _WRITE = 1, 2
_FOR_EVER = timedelta(days=3650)
"""How long a rank waits for something to copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageParts:
    """Where the parts of ranks are in the image of a page."""

    sizes: Sequence[int]
    """Bytes of the part of each rank."""

    @property
    def num_bytes(self) -> int:
        """Bytes of an image."""
        return sum(self.sizes)

    def of(self, images: Bytes, rank: int) -> Bytes:
        """Return the part of a rank, `[n, its bytes]`, of `[n, num_bytes]`."""
        ends = list(accumulate(self.sizes, initial=0))
        return images[:, ends[rank] : ends[rank + 1]]


class PagesOfRanks:
    """The pages of all ranks, as rank 0 copies them; satisfies `DevicePages`. Thread-safe.

    Args:
        own: pages of rank 0.
        num_layers: of them.
        images: `[n, image]`, memory of the host that all ranks share.
        parts: of an image.
        place: of rank 0 among all ranks.
        end_reason: of the group.
    """

    __slots__ = ("_end_reason", "_group", "_images", "_num_layers", "_own", "_parts", "_turn", "page_bytes")

    def __init__(
        self,
        own: DevicePages,
        num_layers: int,
        images: Bytes,
        parts: ImageParts,
        place: GroupPlace,
        *,
        end_reason: EndReason,
    ) -> None:
        self._own = own
        self._num_layers = num_layers
        self._images = images
        self._parts = parts
        self._end_reason = end_reason
        self._group: Any = place.gloo()
        self._turn = threading.Lock()
        """Held while something is copied."""
        self.page_bytes = parts.num_bytes
        """Bytes of a page on all ranks."""

    def read(self, pages: Sequence[int], memory: Bytes, slots: Sequence[int]) -> None:
        """Copy pages out on all ranks.

        Raises:
            RunnerLostError: a rank is lost.
            RuntimeError: a rank could not copy.
        """
        self._copy(_READ, pages, memory, slots)

    def write(self, pages: Sequence[int], memory: Bytes, slots: Sequence[int], arrived: Callable[[int], None]) -> None:
        """Copy pages in on all ranks, all layers at once; see `read`."""
        self._copy(_WRITE, pages, memory, slots)
        arrived(self._num_layers)

    def _copy(self, kind: int, pages: Sequence[int], memory: Bytes, slots: Sequence[int]) -> None:
        assert memory.ctypes.data == self._images.ctypes.data, "other ranks know no other memory"
        others = range(1, len(self._parts.sizes))
        head = torch.tensor([kind, len(pages)])
        places = torch.tensor([list(pages), list(slots)])
        with self._turn, typed_errors(self._end_reason):
            sent = [self._group.send([one], rank, 0) for rank in others for one in (head, places)]
            try:
                _copied(kind, self._own, pages, self._parts.of(memory, 0), slots)
            finally:
                for one in sent:
                    one.wait()
                answers = torch.zeros(len(others), dtype=torch.int64)
                for rank in others:
                    self._group.recv([answers[rank - 1 : rank]], rank, 0).wait()
        if (failed := [rank for rank in others if not answers[rank - 1]]) and failed:
            raise RuntimeError(f"rank {failed[0]} could not copy {len(pages)} pages; its log says why")


def copy_for_rank_0(own: DevicePages, images: Bytes, parts: ImageParts, place: GroupPlace) -> threading.Thread:
    """Connect to rank 0; copy the part of this rank whenever it says so, on a thread, until it has ended.

    Args:
        own: pages of this rank.
        images: see `PagesOfRanks`.
        parts: likewise.
        place: of this rank among all.
    """
    group: Any = place.gloo()

    def run() -> None:
        head = torch.zeros(2, dtype=torch.int64)
        memory = parts.of(images, place.rank)
        while True:
            try:
                group.recv([head], 0, 0).wait(_FOR_EVER)
                kind, num = head.tolist()
                places = torch.zeros((2, num), dtype=torch.int64)
                group.recv([places], 0, 0).wait()
            except RuntimeError:  # rank 0 has ended
                return
            pages, slots = places.tolist()
            is_done = True
            try:
                _copied(kind, own, pages, memory, slots)
            except Exception:
                _log.exception("rank %d could not copy pages", place.rank)
                is_done = False
            try:
                group.send([torch.tensor([int(is_done)])], 0, 0).wait()
            except RuntimeError:
                return

    thread = threading.Thread(target=run, name="pages", daemon=True)
    thread.start()
    return thread


def _copied(kind: int, own: DevicePages, pages: Sequence[int], memory: Bytes, slots: Sequence[int]) -> None:
    if kind == _READ:
        own.read(pages, memory, slots)
    else:
        own.write(pages, memory, slots, _ignore)


def _ignore(num_layers: int) -> None:
    """Note nothing: a page is there when all ranks have all layers."""
