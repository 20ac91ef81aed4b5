"""Page ids as indices: slices where pages are consecutive, because these cost less than arrays."""

from itertools import chain
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Part: TypeAlias = tuple[NDArray[np.int32], NDArray[np.intp] | slice]
"""Some page ids, and the same as an index."""

_INT32 = np.dtype(np.int32)
_MANY, _LONG = 4096, 512
"""From _MANY pages on, runs of _LONG pages on average cost less as slices."""


def parts_of(pages: NDArray[np.int32], num_pages: int) -> list[Part]:
    """Split the ids where they are not consecutive, if they are distinct ids of the pool in a few runs.

    The pages of a long prompt lie in a few runs: those that shorter requests have freed are handed out first.

    Args:
        pages: `[n] int32`, page ids, not checked yet.
        num_pages: Number of pages of the pool.

    Returns:
        The runs, with slices; or all pages as one part, with an array.

    Raises:
        ValueError: `pages` is not a one-dimensional int32 array.
    """
    if pages.dtype == _INT32 and pages.ndim == 1 and len(pages):
        first, last = int(pages[0]), int(pages[-1])
        if last - first == len(pages) - 1 and not np.count_nonzero(pages[1:] <= pages[:-1]):
            if first >= 0 and last < num_pages:
                return [(pages, slice(first, last + 1))]
        elif len(pages) >= _MANY:
            is_break = pages[1:] - pages[:-1] != 1
            if np.count_nonzero(is_break) < len(pages) // _LONG:
                runs = np.split(pages, np.flatnonzero(is_break) + 1)
                indices = [slice(int(run[0]), int(run[-1]) + 1) for run in runs]
                bounds = [0, *chain.from_iterable(sorted((one.start, one.stop) for one in indices)), num_pages]
                if bounds == sorted(bounds):  # no run overlaps another or leaves the pool
                    return list(zip(runs, indices, strict=True))
    return [(pages, as_index(pages))]


def taken(array: NDArray[np.int32], places: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return `array[places]`; many places are often a few runs, because pages that are freed together get such places.

    Args:
        array: Where to read.
        places: `[n] int32`, indices of it.
    """
    if len(places) < _MANY:
        return array.take(places)  # twice as fast as an index of int32
    return np.concatenate([array[index] for _, index in parts_of(places, len(array))])


def as_index(pages: NDArray[np.int32]) -> NDArray[np.intp]:
    """Return the ids as indices; negative ids become larger than any page.

    Raises:
        ValueError: `pages` is not a one-dimensional int32 array.
    """
    if pages.dtype != np.int32 or pages.ndim != 1:
        raise ValueError(f"pages must be a one-dimensional int32 array, got {pages.dtype} of shape {pages.shape}")
    return pages.view(np.uint32).astype(np.intp)
