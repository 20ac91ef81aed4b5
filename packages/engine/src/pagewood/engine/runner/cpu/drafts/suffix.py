"""Drafts from earlier outputs of the same namespace and from a row's own text: an index on the host.

Source: Oliaro et al., SuffixDecoding, arXiv 2411.04975; the names of the parameters are vLLM's.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import count

import numpy as np

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.runner.cpu.compiled.drafting.suffix import BLOCK, NUM_CANDIDATES, ORDERS, append, draft

_SMALLEST = 4096  # tokens of the first log of a namespace


@dataclass(frozen=True, slots=True)
class _Log:
    """Outputs of one namespace in the order of time; full at some point, and then only read."""

    serial: int
    tokens: Int32
    """[C] tokens plus 1; 0 is empty."""
    chains: Int32
    """[2, ORDERS, C] heads of chains by hash, and the next place by place."""
    links: Int32
    """[C / BLOCK, 2] previous and next block."""
    used: Int32
    """[1] number of blocks in use."""

    @staticmethod
    def of(capacity: int, serial: int) -> _Log:
        """Return an empty log; the memory is committed as it is filled."""
        return _Log(
            serial,
            np.zeros(capacity, np.int32),
            np.zeros((2, ORDERS, max(capacity, 1)), np.int32),
            np.zeros((max(capacity // BLOCK, 1), 2), np.int32),
            np.ones(1, np.int32),
        )

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in (self.tokens, self.chains, self.links, self.used))


@dataclass(frozen=True, slots=True)
class _Outputs:
    """The outputs of one namespace: the log that grows, and the one before it, which is full."""

    log: _Log
    older: _Log


class SuffixIndex:
    """Drafts what most often followed the last tokens of a row, in that row and in outputs of its namespace.

    Each namespace has logs of its own. A log that is full becomes the older one, which replaces the one before; the new
    one has twice its size, up to half of `max_tokens`. If the room is not enough, the namespaces that had no new token
    for the longest time are dropped whole.

    Invariant: a row reads only logs of its own namespace, and all logs together hold at most `max_tokens` tokens.
    Use it from one thread.
    """

    __slots__ = (
        "_capacity", "_depth", "_factor", "_keys", "_largest", "_max_steps", "_max_tokens", "_min_share", "_none",
        "_outputs", "_pool", "_serials", "_states", "_tokens",
    )  # fmt: skip

    follows = True

    def __init__(
        self,
        tokens: Int32,
        *,
        max_tokens: int = 1 << 20,
        max_depth: int = 24,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
        max_steps: int = 64,
    ) -> None:
        """Allocate the state of rows, and compile. Logs are allocated as outputs come.

        Args:
            tokens: `[R, W] int32`, the token table of the runner. It is read, and drafts are written to it.
            max_tokens: room of all logs together. A token takes 20.25 bytes.
            max_depth: longest suffix that is compared.
            max_spec_factor: a draft has at most this many tokens per token of its match.
            min_token_prob: a draft ends before its estimated probability falls below this.
            max_steps: places of one chain that are looked at; the latest ones.

        Raises:
            ValueError: a number is out of range.
        """
        if max_depth < 2:
            raise ValueError(f"max_depth must be >= 2, got {max_depth}")
        if not max_spec_factor > 0:
            raise ValueError(f"max_spec_factor must be > 0, got {max_spec_factor}")
        if not 0 <= min_token_prob <= 1:
            raise ValueError(f"min_token_prob must be in [0, 1], got {min_token_prob}")
        least = 2 * _power_of_two(max_depth + 3 * BLOCK)
        if max_tokens < least:
            raise ValueError(f"max_tokens must be >= {least} for a max_depth of {max_depth}, got {max_tokens}")
        for kernel in (append, draft):
            kernel.compile()
        self._tokens = tokens
        self._max_tokens = max_tokens
        self._capacity = 0  # written by: _renew
        self._largest = 1 << ((max_tokens // 2).bit_length() - 1)
        self._depth = max_depth
        self._factor = max_spec_factor
        self._max_steps = max_steps
        self._min_share = min_token_prob
        longest = max(int(max_depth * max_spec_factor + 1e-6), 1)
        self._pool: Int32 = np.empty((NUM_CANDIDATES, longest), np.int32)  # written by: draft
        self._keys: list[int | None] = [None] * len(tokens)  # written by: begin
        self._states: Int32 = np.zeros((len(tokens), 3), np.int32)  # written by: begin, advance
        self._serials = count(1)  # written by: _renew
        nothing = _Log.of(0, next(self._serials))
        self._none = _Outputs(nothing, nothing)
        self._outputs: OrderedDict[int, _Outputs] = OrderedDict()  # written by: advance, _renew

    @property
    def num_namespaces(self) -> int:
        """Namespaces that have logs."""
        return len(self._outputs)

    @property
    def capacity(self) -> int:
        """Tokens for which the logs have room, at most `max_tokens`."""
        return self._capacity

    @property
    def num_bytes(self) -> int:
        """Bytes of all logs, used or not."""
        return sum(log.num_bytes for outputs in self._outputs.values() for log in (outputs.log, outputs.older))

    def begin(self, row: int, namespace: int, num_prompt: int) -> None:
        """Give a row to a request; its first `num_prompt` tokens are its prompt, which is not kept.

        For a request that was preempted, all tokens that were indexed before count as prompt.
        """
        self._keys[row] = namespace
        self._states[row] = (num_prompt, -1, 0)

    def advance(self, rows: Int32, ends: Int32) -> None:
        """Index the tokens that rows `[S]` have gained, up to `ends` `[S]`, the numbers of their known tokens."""
        for key, which in self._by_namespace(rows):
            outputs = self._outputs.get(key)
            if outputs is None:
                outputs = self._none
            else:
                self._outputs.move_to_end(key)
            while not self._append(rows, ends, which, outputs.log):
                outputs = self._renew(key)

    def draft(self, rows: Int32, ends: Int32, most: Int32, counts: Int32) -> None:
        """Write drafts after the known tokens of rows, into the token table.

        Args:
            rows: `[S] int32`, rows to draft for; `begin` was called for each.
            ends: `[S] int32`, number of known tokens of each.
            most: `[S] int32`, most draft tokens of each.
            counts: `[S] int32`, written: draft tokens of each.
        """
        for key, which in self._by_namespace(rows):
            outputs = self._outputs.get(key, self._none)
            log, older = outputs.log, outputs.older
            draft(
                *(self._tokens, rows, ends, most, which, self._depth, self._factor, self._min_share, self._max_steps),
                *(log.tokens, log.chains, log.links, older.tokens, older.chains, older.links, self._pool, counts),
            )

    def _append(self, rows: Int32, ends: Int32, which: Int32, log: _Log) -> bool:
        return append(
            *(self._tokens, rows, ends, which, self._states, log.serial, self._depth),
            *(log.tokens, log.chains, log.links, log.used),
        )

    def _by_namespace(self, rows: Int32) -> list[tuple[int, Int32]]:
        """Return each namespace of rows `[S]`, and which of the S rows are in it."""
        groups: dict[int, list[int]] = {}
        numbers: list[int] = rows.tolist()
        for i, row in enumerate(numbers):
            key = self._keys[row]
            if key is None:
                raise ValueError(f"begin must be called for row {row} before it is used")
            groups.setdefault(key, []).append(i)
        return [(key, np.array(which, np.int32)) for key, which in groups.items()]

    def _renew(self, key: int) -> _Outputs:
        """Start a new log for a namespace, drop its older one, and make room for it."""
        outputs = self._outputs.pop(key, self._none)
        self._capacity -= len(outputs.older.tokens)
        size = min(max(2 * len(outputs.log.tokens), _SMALLEST), self._largest)
        while self._capacity + size > self._max_tokens:
            _, dropped = self._outputs.popitem(last=False)
            self._capacity -= len(dropped.log.tokens) + len(dropped.older.tokens)
        self._capacity += size
        renewed = _Outputs(_Log.of(size, next(self._serials)), outputs.log)
        self._outputs[key] = renewed
        return renewed


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
