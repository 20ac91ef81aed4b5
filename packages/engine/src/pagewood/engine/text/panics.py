"""Panics of the `tokenizers` library as ordinary errors."""

from __future__ import annotations

import contextlib
from collections.abc import Generator


class TokenizerPanic(RuntimeError):
    """`tokenizers` panicked on an input. The tokenizer can still be used for other inputs."""


@contextlib.contextmanager
def panics_as_errors() -> Generator[None]:
    """Raise `TokenizerPanic` for a panic inside the block.

    The bindings raise a panic as pyo3's `PanicException`. It derives from `BaseException`, so `except Exception` does
    not catch it, and no module exports it, so only its name identifies it.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerPanic(f"the tokenizers library panicked: {error}") from error
