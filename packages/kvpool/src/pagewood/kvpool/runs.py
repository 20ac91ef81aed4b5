"""Page ids as indices: slices where pages are consecutive, because these cost less than arrays."""

from itertools import chain, pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Part: TypeAlias = tuple[NDArray[np.int32], NDArray[np.intp] | slice]
"""Some page ids, and the same as an index."""

_INT32, _UINT32, _INTP = np.dtype(np.int32), np.dtype(np.uint32), np.dtype(np.intp)
_MANY, _LONG = 4096, 512
"""From _LONG pages on, one run of pages costs less as a slice; from _MANY on, runs of _LONG pages on average do."""


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
    require_vector("pages", pages, _INT32)
    if len(pages) >= _LONG:
        num, first = len(pages), int(pages[0])
        if int(pages[-1]) - first == num - 1 and 1 not in (pages[1:] <= pages[:-1]).tobytes():
            if first >= 0 and first + num <= num_pages:
                return [(pages, slice(first, first + num))]
        elif num >= _MANY:
            cuts = np.flatnonzero(pages[1:] - pages[:-1] != 1)
            if len(cuts) < num // _LONG:
                runs = [pages[start:end] for start, end in pairwise([0, *(cuts + 1).tolist(), num])]
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
    require_vector("pages", pages, _INT32)
    return pages.view(_UINT32).astype(_INTP)


def require_vector(name: str, array: Any, dtype: np.dtype[Any]) -> None:
    """Check an array at run time, because callers may not use a type checker.

    Raises:
        ValueError: `array` is not a one-dimensional numpy array of this dtype.
    """
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:  # pyright: ignore[reportUnknownMemberType]
        raise ValueError(f"{name} must be a one-dimensional {dtype} array, got {array!r:.80}")
