"""A paged KV cache for your own model: memory, free pages, a list of pages per request, and attention over them."""

import numpy as np
import torch

from pagewood.kvpool import MultiHeadLayout, PageAllocator
from pagewood.kvpool.storage import KVStorage


class PagedCache:
    """The keys and values of many requests of different lengths, in one block of memory."""

    def __init__(self, layout: MultiHeadLayout, *, num_bytes: int) -> None:
        num_pages = layout.pages_for(num_bytes)
        self.page_size = layout.page_size
        self.storage = KVStorage(layout, num_pages)
        self.allocator = PageAllocator(num_pages)
        self.pages: list[np.ndarray] = []  # of each request, [pages] int32
        self.lengths: list[int] = []  # of each request, tokens

    def begin(self) -> int:
        """Start a request; return its number."""
        self.pages.append(np.empty(0, np.int32))
        self.lengths.append(0)
        return len(self.pages) - 1

    def extend(self, request: int, num_tokens: int) -> torch.Tensor:
        """Make room for more tokens of a request; return their slots, which `attend` needs in every layer."""
        length, pages = self.lengths[request] + num_tokens, self.pages[request]
        fresh = self.allocator.alloc(-(-length // self.page_size) - len(pages))
        self.pages[request] = np.concatenate((pages, fresh))
        self.lengths[request] = length
        return self.slots(request)[length - num_tokens :]

    def slots(self, request: int) -> torch.Tensor:
        """Return the slots of all tokens of a request, `[tokens] int64`."""
        page, offset = np.divmod(np.arange(self.lengths[request]), self.page_size)
        return torch.as_tensor(self.pages[request][page] * np.int64(self.page_size) + offset)

    def attend(
        self, layer: int, request: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """Store new tokens and return their causal attention; all arrays are `[new, heads, dim]`."""
        self.storage.write(layer, k, v, slots)
        keys, values = self.storage.read(layer, self.slots(request), dtype=q.dtype)
        visible = torch.ones(len(q), len(keys), dtype=torch.bool).tril(len(keys) - len(q))
        q, keys, values = (x.transpose(0, 1)[None] for x in (q, keys, values))
        out = torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=visible, enable_gqa=True)
        return out[0].transpose(0, 1)

    def end(self, request: int) -> None:
        """Free the pages of a request."""
        self.allocator.free(self.pages[request])
        self.pages[request] = np.empty(0, np.int32)
