"""From an allocation to the arrays with which FlashInfer plans a decode step; run it to print them."""

import numpy as np
from numpy.typing import NDArray

from pagewood.kvpool import PageAllocator, RaggedPages, RowPool, ragged_pages


def grow(
    rows: RowPool, allocator: PageAllocator, tickets: NDArray[np.int64], num_tokens: NDArray[np.int32], page_size: int
) -> RaggedPages:
    """Give each request pages for its first `num_tokens` positions, in one call; return the page lists."""
    counts = (num_tokens + page_size - 1) // page_size - rows.num_pages(tickets)
    rows.append(tickets, allocator.alloc(int(counts.sum())), counts)
    return ragged_pages(rows.table, rows.rows(tickets), num_tokens, page_size=page_size)


def main() -> None:
    """Show two steps of three requests."""
    rows, allocator = RowPool(num_rows=8, max_pages=64), PageAllocator(num_pages=100)
    tickets = rows.alloc(3)
    lengths = np.array([5, 32, 17], dtype=np.int32)
    for _ in range(2):
        paged = grow(rows, allocator, tickets, lengths, page_size=16)
        print(f"indptr {paged.indptr}, indices {paged.indices}, last_page_len {paged.last_page_len}")
        # With FlashInfer, where `storage` is a KVStorage on the GPU:
        #     wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, kv_layout="NHD")
        #     arrays = (torch.from_numpy(x).cuda() for x in (paged.indptr, paged.indices, paged.last_page_len))
        #     wrapper.plan(*arrays, num_qo_heads, num_kv_heads, head_dim, 16, kv_data_type=torch.bfloat16)
        #     out = wrapper.run(q, storage.layer(i))  # in each layer; storage.halves(i) works, too
        lengths += 1


if __name__ == "__main__":
    main()
