"""Remember values by token prefix, within a budget of tokens: a response cache and a retrieval cache in one.

A value that was stored for exactly these tokens is a response that can be returned again. A value that was stored for
a prefix of them is a starting point, for example the documents that were retrieved in the previous turn of a
conversation. Here each token is a page of the cache, and a value belongs to the page of its last token. So an eviction
names the values to forget.

    pip install pagewood-radixcache
    python response_cache.py
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from pagewood.radixcache import RadixCache

V = TypeVar("V")
Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found(Generic[V]):
    """A value, and the length of the prefix that it was stored for."""

    num_tokens: int
    value: V


class ResponseCache(Generic[V]):
    """Remembers values by token prefix; the prefixes have `num_tokens` tokens in total, evicted by LRU."""

    def __init__(self, num_tokens: int) -> None:
        self._cache = RadixCache(1)
        self._free = np.arange(num_tokens, dtype=np.int32)
        self._values: dict[int, V] = {}

    def find(self, tokens: Int32, tenant: str | None = None) -> Found[V] | None:
        """Return the value of the longest prefix of `tokens` that has one."""
        pages = self._cache.match(tokens, tenant).pages.tolist()
        for num_tokens in range(len(pages), 0, -1):
            if pages[num_tokens - 1] in self._values:
                return Found(num_tokens=num_tokens, value=self._values[pages[num_tokens - 1]])
        return None

    def put(self, tokens: Int32, value: V, tenant: str | None = None) -> bool:
        """Remember a value for a prompt of at least one token; return False if the prompt exceeds the budget."""
        if len(tokens) > self._cache.num_pages + len(self._free):
            return False
        match = self._cache.match(tokens, tenant)
        lease = self._cache.lock(match.node)
        missing = tokens[match.num_tokens :]
        evicted = self._cache.evict(max(0, len(missing) - len(self._free)))
        for page in evicted.tolist():
            self._values.pop(page, None)
        pages, self._free = np.split(np.concatenate((self._free, evicted)), [len(missing)])
        self._cache.insert(missing, pages, after=lease)
        self._cache.unlock(lease)
        self._values[int(pages[-1] if len(pages) else match.pages[-1])] = value
        return True


def main() -> None:
    """Continue a conversation from the documents of its first turn, and repeat a question."""
    cache = ResponseCache[str](num_tokens=10_000)
    first_turn = np.arange(500, dtype=np.int32)
    cache.put(first_turn, "documents 3 and 8")
    second_turn = np.arange(620, dtype=np.int32)
    found = cache.find(second_turn)
    assert found is not None
    print(f"{found.value}: retrieved {len(second_turn) - found.num_tokens} tokens before the end")
    print(f"the same question again: {cache.find(first_turn)}")
    print(f"the same for another tenant: {cache.find(first_turn, 'other')}")


if __name__ == "__main__":
    main()
