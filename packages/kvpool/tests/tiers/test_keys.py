import numpy as np
import pytest

from pagewood.kvpool.tiers import KeyChain

TOKENS = np.arange(12, dtype=np.int32)


def test_a_key_depends_on_everything_that_the_kv_depends_on() -> None:
    def last(page_size: int = 4, fingerprint: bytes = b"a", namespace: str | None = None, *, first: int = 0) -> bytes:
        chain = KeyChain(page_size, fingerprint=fingerprint)
        tokens = TOKENS.copy()
        tokens[0] = first
        return chain.extend(chain.root(namespace), tokens)[-1]

    keys = [last(), last(2), last(fingerprint=b"b"), last(namespace=""), last(namespace="x"), last(first=1)]
    assert len(set(keys)) == len(keys)
    assert last() == last()


def test_a_chain_can_be_continued_and_ignores_a_partial_page() -> None:
    chain = KeyChain(4, fingerprint=b"")
    keys = chain.extend(chain.root(None), TOKENS)
    assert len(keys) == 3
    assert chain.extend(keys[0], TOKENS[4:11]) == keys[1:2]


def test_a_page_size_below_one_is_an_error() -> None:
    with pytest.raises(ValueError, match="page_size must be >= 1, got 0"):
        KeyChain(0, fingerprint=b"")
