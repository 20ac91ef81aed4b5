"""Pages whose memory is frames, in the form that lower tiers copy: what a hit needs, and a note of what was there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pagewood.engine.core.memory.page_groups import PageGroups
from pagewood.engine.core.messages.arrays import Int32
from pagewood.kvpool.tiers.pages.arrays import Bytes
from pagewood.kvpool.tiers.pages.device import DevicePages

_NOTE_BYTES = 8
"""At the end of an image: whether the page had frames in windows. It is a word, so that images are aligned."""


class FramedPages:
    """Copies pages between frames and images; satisfies `DevicePages` and `PageHolder` of kvpool's tiers.

    An image has room for the frames of all groups, then for what lies beside them under the page's own id, then a note.
    A page that has left the windows of all requests may have lost its frames there. Its image then serves longer
    prefixes only, and a page that is loaded from it has no frames in windows either.

    Invariant: a copy reads and writes frames that their page keeps until it has ended.
    """

    __slots__ = ("_beside", "_frame_bytes", "_frames", "_groups", "_held", "page_bytes")

    def __init__(self, frames: DevicePages, groups: PageGroups, *, beside: DevicePages | None = None) -> None:
        """Copy the pages of `groups`.

        Args:
            frames: the memory of frames.
            groups: knows the frames of pages.
            beside: a drafter's memory, by the ids of pages; None: no drafter has memory.
        """
        self._frames = frames
        self._beside = beside
        self._groups = groups
        self._frame_bytes = frames.page_bytes
        self._held: dict[int, Int32] = {}
        """`[groups]`, the frames of the pages that copies read."""  # written by: framed_pages
        self.page_bytes = image_bytes(frames.page_bytes, groups.num_groups, 0 if beside is None else beside.page_bytes)

    def hold(self, pages: Sequence[int]) -> None:
        """Keep the frames that pages have now, for a copy that reads them."""
        ids = np.array(pages, np.int32)
        self._groups.hold(ids)
        self._held.update(zip(pages, self._groups.frames_of(ids).T, strict=True))

    def let_go(self, pages: Sequence[int]) -> None:
        """Undo one `hold`."""
        for page in pages:
            del self._held[page]
        self._groups.end_copy(np.array(pages, np.int32))

    def first_lacking(self, pages: Sequence[int], num_pages: int) -> int:
        """Return the first of the cached pages of a prefix that lacks a frame which a hit reads; see `PageHolder`."""
        return self._groups.first_lacking(np.array(pages, np.int32), num_pages)

    def adopt(self, pages: Sequence[int], memory: Bytes, slots: Sequence[int]) -> None:
        """Note that the cache owns loaded pages; those whose images lack windows give up their frames for them."""
        ids = np.array(pages, np.int32)
        self._groups.adopt(ids)
        self._groups.end_copy(ids)
        self._groups.drop_windows(ids[memory[np.asarray(slots, np.intp), -_NOTE_BYTES] == 0])

    def fill(self, cached: Sequence[int], pages: Sequence[int], memory: Bytes, slots: Sequence[int]) -> int:
        """Move frames in windows from loaded pages to cached ones that have lost theirs; return how many."""
        have_windows = memory[np.asarray(slots, np.intp), -_NOTE_BYTES] > 0
        return self._groups.give(np.array(pages, np.int32)[have_windows], np.array(cached, np.int32)[have_windows])

    def give_back(self, pages: Sequence[int]) -> None:
        """Free the frames in windows of loaded pages that are not needed."""
        self._groups.end_copy(np.array(pages, np.int32))

    def read(self, pages: Sequence[int], memory: Bytes, slots: Sequence[int]) -> None:
        """Copy pages out to `memory[slots[i]]`."""
        if pages and pages[0] in self._held:
            frames = np.stack([self._held[page] for page in pages], axis=1)
        else:  # the caller waits meanwhile
            frames = self._groups.frames_of(np.array(pages, np.int32))
        for index, row in enumerate(frames):
            there, places = _there(row, slots)
            self._frames.read(there, memory[:, index * self._frame_bytes : (index + 1) * self._frame_bytes], places)
        if self._beside is not None:
            self._beside.read(pages, self._part_beside(memory), slots)
        memory[np.asarray(slots, np.intp), -_NOTE_BYTES:] = 0
        memory[np.asarray(slots, np.intp), -_NOTE_BYTES] = frames[-1] >= 0

    def write(self, pages: Sequence[int], memory: Bytes, slots: Sequence[int], arrived: Callable[[int], None]) -> None:
        """Copy pages in; all of their layers arrive together."""
        for index, row in enumerate(self._groups.frames_of(np.array(pages, np.int32))):
            there, places = _there(row, slots)
            part = memory[:, index * self._frame_bytes : (index + 1) * self._frame_bytes]
            self._frames.write(there, part, places, _nothing)
        if self._beside is not None:
            self._beside.write(pages, self._part_beside(memory), slots, _nothing)
        arrived(1)

    def _part_beside(self, memory: Bytes) -> Bytes:
        return memory[:, self._groups.num_groups * self._frame_bytes : -_NOTE_BYTES]


def image_bytes(frame_bytes: int, num_groups: int, beside_bytes: int) -> int:
    """Return the size of an image of a page, in bytes."""
    return num_groups * frame_bytes + beside_bytes + _NOTE_BYTES


def _there(frames: Int32, slots: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the frames that exist, and the slots of their pages."""
    places = np.flatnonzero(frames >= 0)
    return frames[places].tolist(), np.asarray(slots, np.intp)[places].tolist()


def _nothing(_: int) -> None:
    pass
