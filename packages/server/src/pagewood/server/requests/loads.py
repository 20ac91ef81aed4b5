"""The choice of a tokenizer for the next request: the working one with the fewest bytes outstanding."""

from __future__ import annotations


class TokenizerLoads:
    """The bytes of the requests that were sent to each tokenizer and have had no answer yet.

    A request that was tokenized still counts until its first answer: nothing else shows that it left its tokenizer. A
    tokenizer that died is chosen again when its next process has shown that it works; until then only if none works.

    Args:
        num_tokenizers: at least 1.
    """

    __slots__ = ("_away", "_num_bytes", "_requests")

    def __init__(self, num_tokenizers: int) -> None:
        self._num_bytes = [0] * num_tokenizers  # written by: add, remove, clear
        self._requests: dict[str, tuple[int, int]] = {}  # written by: add, remove, clear. Id -> tokenizer, bytes
        self._away: set[int] = set()  # written by: lost, back

    @property
    def away(self) -> frozenset[int]:
        """The tokenizers that died and are not known to work again."""
        return frozenset(self._away)

    @property
    def lightest(self) -> int:
        """Index of the tokenizer that gets the next message."""
        indices = range(len(self._num_bytes))
        working = [index for index in indices if index not in self._away]
        return min(working or indices, key=self._num_bytes.__getitem__)

    def add(self, request_id: str, num_bytes: int) -> int:
        """Count a new request of `num_bytes`, and return the index of the tokenizer that it goes to."""
        tokenizer = self.lightest
        self._num_bytes[tokenizer] += num_bytes
        self._requests[request_id] = (tokenizer, num_bytes)
        return tokenizer

    def remove(self, request_id: str) -> None:
        """Count a request no longer; one that is not counted changes nothing."""
        counted = self._requests.pop(request_id, None)
        if counted is not None:
            tokenizer, num_bytes = counted
            self._num_bytes[tokenizer] -= num_bytes

    def clear(self, tokenizer: int) -> None:
        """Count no request of a tokenizer any longer."""
        for request_id in [name for name, (index, _) in self._requests.items() if index == tokenizer]:
            self.remove(request_id)

    def lost(self, tokenizer: int) -> None:
        """Note that a tokenizer died."""
        self.clear(tokenizer)
        self._away.add(tokenizer)

    def back(self, tokenizer: int) -> None:
        """Note that a tokenizer works again."""
        self._away.discard(tokenizer)
