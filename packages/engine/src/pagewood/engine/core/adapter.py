"""An adapter that requests may name, and where in a request it begins to compute."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from pagewood.engine.core.messages.arrays import Int32

_NUM_MARKS = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Adapter:
    """An adapter as it was loaded once. A request keeps the one that it had at its arrival, to its end."""

    name: str
    version: str
    """Distinguishes its results from those of other adapters of that name: a digest of its contents."""
    number: int
    """Unique among all that the engine has loaded; the runner knows it by this."""
    weights: object
    """What the runner computes with; the engine only keeps it alive."""
    invocation: tuple[int, ...] = ()
    """Tokens that activate it, see `Activation`; empty: it computes all positions."""
    is_bound: bool = False
    """Whether it is right for the weights only that it was read for, because numbers of these are in it."""

    def activation_in(self, prompt: Int32) -> Activation | None:
        """Return where a prompt activates it; None: nowhere, or it needs no activation."""
        size = len(self.invocation)
        if not size or len(prompt) < size:
            return None
        windows = np.lib.stride_tricks.sliding_window_view(prompt, size)
        places = (windows == np.array(self.invocation, np.int32)).all(axis=1).nonzero()[0]
        return Activation(start=int(places[-1]), marks=_marks_of(self.version)) if len(places) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAdapter:
    """An adapter whose folder has been read."""

    version: str
    """See `Adapter.version`."""
    weights: object
    """See `Adapter.weights`."""
    invocation: tuple[int, ...] = ()
    """See `Adapter.invocation`."""
    is_bound: bool = False
    """See `Adapter.is_bound`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Activation:
    """The position from which on an adapter computes a request; the model alone computes those before.

    So the KV before it is that of the model, under the model's key. From it on, the cache has the KV under other ids:
    those of the first positions stand for the adapter too.
    """

    start: int
    """The first position of the last occurrence of the invocation tokens in the prompt."""
    marks: Int32
    """`[8]`, negative; each of the first positions is distinguished by 31 bits of a hash of the adapter's version."""

    def marked(self, tokens: Int32, first: int) -> Int32:
        """Return the ids under which the cache has `tokens`, which lie from position `first` on."""
        begin, end = max(self.start, first), min(self.start + len(self.marks), first + len(tokens))
        if begin >= end:
            return tokens
        marked = tokens.copy()
        marked[begin - first : end - first] ^= self.marks[begin - self.start : end - self.start]
        return marked


def _marks_of(version: str) -> Int32:
    words = np.frombuffer(blake2b(version.encode(), digest_size=4 * _NUM_MARKS).digest(), "<i4")
    return words.astype(np.int32) | np.int32(-(2**31))
