"""States of recurrent layers among the pages of a device: to the tiers, a state is a few more pages."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

from pagewood.kvpool.tiers.pages.arrays import Bytes
from pagewood.kvpool.tiers.pages.device import DevicePages
from pagewood.kvpool.tiers.pages.keys import KEY_BYTES

_MOST_PARTS = 512
_ALIGNMENT = 64


def num_state_parts(state_bytes: int, page_bytes: int) -> int:
    """Return in how many parts of the size of a page, or of a larger one, states are copied.

    Each part has a key, and is found by itself. So they are no more than 512, although the pages of a model without
    attention have a few bytes.
    """
    return min(_MOST_PARTS, -(-state_bytes // page_bytes))


def part_bytes(state_bytes: int, page_bytes: int, num_parts: int) -> int:
    """Return the size of a part of a state, and so of the image of a page: that of a page if parts fit into it."""
    least = -(-state_bytes // max(1, num_parts))
    return page_bytes if least <= page_bytes else -(-least // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Bytes of an array that are in one part of a state."""

    array: Any  # contents written by: states
    of_array: slice
    of_part: slice


class StateCopies(Protocol):
    """Copies bytes between arrays of states on a device and memory of the host."""

    def out(self) -> AbstractContextManager[object]:
        """Return a context for copies to the host, at whose end they are done."""
        ...

    def into(self) -> AbstractContextManager[object]:
        """Return a context for copies to the device, at whose end they are done."""
        ...

    def copy(self, target: Any, source: Any) -> None:
        """Copy the bytes of one view to another one of this size, at the latest when the context ends."""
        ...


class _ArrayCopies:
    """Satisfies `StateCopies` for numpy arrays."""

    def out(self) -> AbstractContextManager[object]:
        """Return a context."""
        return nullcontext()

    into = out

    def copy(self, target: Bytes, source: Bytes) -> None:
        """Copy bytes at once."""
        target[:] = source


class StatePages:
    """The pages of a device, and the states of its recurrent layers as parts of the size of the image of a page.

    The image of a state is the concatenation of its arrays in all layers, cut into parts; zeros fill the last part.
    Images of pages have zeros at the end if parts are larger than pages, see `num_state_parts` and `part_bytes`. A part
    has a number below 0 as its id, and a key that follows from the key of the page at whose end the state is. So all
    that has pages by id or by key has states, too, and one budget is for both. A state that lacks a part is of no use,
    but it is never taken for a whole one: each part has a key and a checksum of its own.

    Invariant: part `i` of the state in place `p` has the id `-1 - (p * num_parts + i)`.

    Args:
        pages: The pages.
        layers: For each recurrent layer its arrays, `[num_places, num_bytes] uint8` each, contiguous within a place:
            numpy's, or what `copies` takes.
        copies: Makes the copies of states; None: they are numpy arrays.
        num_parts: Parts of a state, if other processes copy the same ones of other layers; these may be none. By
            default `num_state_parts`.

    Raises:
        ValueError: `layers` has no arrays and `num_parts` is not given, it is less than 1, or pages have no bytes.

    Attributes:
        page_bytes: Size of the image of a page, and of a part of a state, in bytes.
        num_parts: Parts of a state.
    """

    __slots__ = ("_copies", "_own_bytes", "_pages", "_pieces", "num_parts", "page_bytes")

    def __init__(
        self,
        pages: DevicePages,
        layers: Sequence[Sequence[Any]],
        *,
        num_parts: int | None = None,
        copies: StateCopies | None = None,
    ) -> None:
        arrays = [array for arrays in layers for array in arrays]
        self._pages = pages
        self._copies: StateCopies = copies or _ArrayCopies()
        self._own_bytes = own = pages.page_bytes
        if (not arrays and num_parts is None) or own < 1:
            raise ValueError(f"layers must have arrays, and pages bytes, got {len(arrays)} arrays and {own} bytes")
        state_bytes = sum(array.shape[1] for array in arrays)
        self.num_parts = num_state_parts(state_bytes, own) if num_parts is None else num_parts  # written by: __init__
        if self.num_parts < 1:
            raise ValueError(f"num_parts must be at least 1, got {num_parts}")
        self.page_bytes = size = part_bytes(state_bytes, own, self.num_parts)  # written by: __init__
        # By part, what is in it.
        self._pieces: list[list[_Piece]] = []
        at = 0
        for array in arrays:
            first, end = 0, array.shape[1]
            while first < end:
                if at % size == 0:
                    self._pieces.append([])
                num = min(end - first, size - at % size)
                of_part = slice(at % size, at % size + num)
                self._pieces[-1].append(_Piece(array=array, of_array=slice(first, first + num), of_part=of_part))
                first, at = first + num, at + num
        self._pieces += [[] for _ in range(self.num_parts - len(self._pieces))]

    def parts_of(self, place: int) -> list[int]:
        """Return the ids of the parts of the state in a place."""
        first = -1 - place * self.num_parts
        return list(range(first, first - self.num_parts, -1))

    def keys_of(self, key: bytes) -> list[bytes]:
        """Return the keys of the parts of the state at the end of the page with the key `key`."""
        return [_key(key, part) for part in range(self.num_parts)]

    def mark_of(self, key: bytes) -> bytes:
        """Return the last of these keys. Parts are copied in their order, so a tier that has it has most likely all."""
        return _key(key, self.num_parts - 1)

    def read(self, pages: Sequence[int], memory: Bytes, slots: Sequence[int]) -> None:
        """Copy pages and parts of states out: `pages[i]` to `memory[slots[i]]`."""
        others, parts = self._divided(pages, slots)
        if parts:
            with self._copies.out():
                for place, pieces, slot in parts:
                    row = memory[slot]
                    for piece in pieces:
                        self._copies.copy(row[piece.of_part], piece.array[place, piece.of_array])
                    row[pieces[-1].of_part.stop if pieces else 0 :] = 0
        if others[0]:
            self._pages.read(others[0], memory[:, : self._own_bytes], others[1])
            if self._own_bytes < self.page_bytes:
                memory[others[1], self._own_bytes :] = 0

    def write(self, pages: Sequence[int], memory: Bytes, slots: Sequence[int], arrived: Callable[[int], None]) -> None:
        """Copy pages and parts of states in, the latter first: a layer has arrived when its states and pages have."""
        others, parts = self._divided(pages, slots)
        if parts:
            with self._copies.into():
                for place, pieces, slot in parts:
                    for piece in pieces:
                        self._copies.copy(piece.array[place, piece.of_array], memory[slot, piece.of_part])
                    arrived(0)
        if others[0]:
            self._pages.write(others[0], memory[:, : self._own_bytes], others[1], arrived)

    def _divided(
        self, pages: Sequence[int], slots: Sequence[int]
    ) -> tuple[tuple[list[int], list[int]], list[tuple[int, list[_Piece], int]]]:
        """Return the pages and their slots; and of parts of states the place, the pieces and the slot."""
        others: tuple[list[int], list[int]] = ([], [])
        parts: list[tuple[int, list[_Piece], int]] = []
        for page, slot in zip(pages, slots, strict=True):
            if page >= 0:
                others[0].append(page)
                others[1].append(slot)
            else:
                place, part = divmod(-1 - page, self.num_parts)
                parts.append((place, self._pieces[part], slot))
        return others, parts


def _key(key: bytes, part: int) -> bytes:
    return blake2b(key, digest_size=KEY_BYTES, salt=part.to_bytes(8, "little"), person=b"state").digest()
