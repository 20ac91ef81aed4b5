"""Arithmetic of pages."""


def pages_of(num_tokens: int, page_size: int) -> int:
    """Return how many pages `num_tokens` tokens need."""
    return -(-num_tokens // page_size)


def round_up(num_tokens: int, page_size: int) -> int:
    """Return `num_tokens` rounded up to whole pages, in tokens."""
    return pages_of(num_tokens, page_size) * page_size
