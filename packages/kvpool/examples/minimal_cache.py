"""A paged KV cache for your own model: memory, free pages, a row of pages per request, and attention over them."""

import numpy as np
import torch

from pagewood.kvpool import MultiHeadLayout, PageAllocator, RowPool
from pagewood.kvpool.storage import KVStorage


class PagedCache:
    """The keys and values of many requests of different lengths, in one block of memory."""

    def __init__(self, layout: MultiHeadLayout, *, num_bytes: int, max_requests: int, max_length: int) -> None:
        num_pages = layout.pages_for(num_bytes)
        self.page_size = layout.page_size
        self.storage = KVStorage(layout, num_pages)
        self.allocator = PageAllocator(num_pages)
        self.rows = RowPool(max_requests, -(-max_length // layout.page_size))
        self.lengths: dict[int, int] = {}  # by ticket

    def begin(self) -> int:
        """Start a request; return its ticket."""
        ticket = int(self.rows.alloc(1)[0])
        self.lengths[ticket] = 0
        return ticket

    def extend(self, ticket: int, num_tokens: int) -> torch.Tensor:
        """Make room for more tokens of a request; return their slots, which `attend` needs in every layer."""
        length = self.lengths[ticket] + num_tokens
        num_missing = -(-length // self.page_size) - len(self.rows.pages(ticket))
        pages = self.allocator.alloc(num_missing)
        self.rows.append(np.array([ticket]), pages, np.array([num_missing], dtype=np.int32))
        self.lengths[ticket] = length
        return self.slots(ticket)[length - num_tokens :]

    def slots(self, ticket: int) -> torch.Tensor:
        """Return the slots of all tokens of a request, `[tokens] int64`."""
        page, offset = np.divmod(np.arange(self.lengths[ticket]), self.page_size)
        return torch.as_tensor(self.rows.pages(ticket)[page] * np.int64(self.page_size) + offset)

    def attend(
        self, layer: int, ticket: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """Store new tokens and return their causal attention; all arrays are `[new, heads, dim]`."""
        self.storage.write(layer, k, v, slots)
        keys, values = self.storage.read(layer, self.slots(ticket), dtype=q.dtype)
        visible = torch.ones(len(q), len(keys), dtype=torch.bool).tril(len(keys) - len(q))
        q, keys, values = (x.transpose(0, 1)[None] for x in (q, keys, values))
        out = torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=visible, enable_gqa=True)
        return out[0].transpose(0, 1)

    def end(self, ticket: int) -> None:
        """Free the pages and the row of a request."""
        self.allocator.free(self.rows.pages(ticket))
        self.rows.free(np.array([ticket]))
        del self.lengths[ticket]
