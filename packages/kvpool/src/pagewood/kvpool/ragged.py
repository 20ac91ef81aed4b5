"""Page lists of different lengths in the form that FlashInfer's kernels expect."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewood.kvpool.arrays import check_at_least_one


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RaggedPages:
    """The pages of a batch of requests, one request after another: FlashInfer's `paged_kv_*` arguments.

    Attributes:
        indptr: `[n + 1] int32`; the pages of request i are `indices[indptr[i]:indptr[i + 1]]`.
        indices: `[indptr[n]] int32`, page ids.
        last_page_len: `[n] int32`, number of positions in use in the last page of each request, in [1, page_size].
    """

    indptr: NDArray[np.int32]
    indices: NDArray[np.int32]
    last_page_len: NDArray[np.int32]


def ragged_pages(
    table: NDArray[np.int32], rows: NDArray[np.intp], num_tokens: NDArray[np.int32], *, page_size: int
) -> RaggedPages:
    """Gather the pages that hold the first `num_tokens` positions of some rows of a page table in host memory.

    This is for engines that keep page ids in host memory, as `RowPool` does. pagewood-engine does not use it: its CUDA
    runner keeps the page table on the device and gathers the ids there.

    Args:
        table: `[num_rows, max_pages] int32`, page ids, such as `RowPool.table`.
        rows: `[n]`, indices of rows of the table.
        num_tokens: `[n] int32`, number of positions of each request, including those of the coming step, in [1,
            max_pages * page_size].
        page_size: Positions in a page.

    Returns:
        The page lists.

    Raises:
        ValueError: `rows` and `num_tokens` differ in length, a row or a number of tokens is out of range, or an
            argument has another type or number of dimensions.
    """
    check_at_least_one(page_size=page_size)
    for name, array, num_axes in (("table", table, 2), ("rows", rows, 1), ("num_tokens", num_tokens, 1)):
        if not isinstance(array, np.ndarray) or array.ndim != num_axes or array.dtype.kind not in "iu":  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"{name} must be an array of integers with {num_axes} dimensions, got {array!r:.80}")
    limit = table.shape[1] * page_size
    if num_tokens.shape != rows.shape:
        raise ValueError(f"num_tokens must have the shape of rows, {rows.shape}, got {num_tokens.shape}")
    if len(rows) and not 0 <= rows.min() <= rows.max() < len(table):
        raise ValueError(f"rows must be in [0, {len(table)}), got {rows.min()} .. {rows.max()}")
    if len(rows) and not 1 <= num_tokens.min() <= num_tokens.max() <= limit:
        raise ValueError(f"num_tokens must be in [1, {limit}], got {num_tokens.min()} .. {num_tokens.max()}")
    counts = (num_tokens - 1) // page_size + 1
    indptr = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(counts, out=indptr[1:])
    starts = rows * table.shape[1] - indptr[:-1]
    indices = table.reshape(-1)[np.repeat(starts, counts) + np.arange(indptr[-1])]
    last_page_len = (num_tokens - 1) % page_size + 1
    return RaggedPages(indptr=indptr, indices=indices, last_page_len=last_page_len.astype(np.int32))
