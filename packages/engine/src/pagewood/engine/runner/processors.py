"""Calls the functions with which rows change their logits; for runners of every device.

Legend: V vocab_size.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagewood.engine.api import LogitsProcessor
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.processors import arguments_of

_log = logging.getLogger(__name__)

Process = Callable[..., None]
"""Called with tokens, logits and keyword arguments; see `EngineConfig.logits_processors`."""


class RowCalls:
    """The calls of one request. Invariant: an exception in one is logged once, and leaves NaN as logits.

    So do calls that leave no token a probability.
    """

    __slots__ = ("_calls", "_has_failed")

    def __init__(self, processors: Sequence[LogitsProcessor], functions: Mapping[str, Process]) -> None:
        self._calls: list[tuple[str, Process, dict[str, Any]]] = [
            (one.name, functions[one.name], arguments_of(one)) for one in processors
        ]
        self._has_failed = False  # written by: change

    def change(self, text: Tensor, logits: Tensor) -> None:
        """Change the logits of one position.

        Args:
            text: `[n] int32`, the tokens before the drawn one, not used elsewhere.
            logits: `[V] float32`, changed.
        """
        for name, function, arguments in self._calls:
            try:
                function(text, logits, **arguments)
            except Exception:  # the code is the operator's: whatever it raises ends this request only
                if not self._has_failed:
                    _log.exception("logits processor %r failed; its request ends", name)
                self._has_failed = True
                logits.fill_(math.nan)
                return
        logits.masked_fill_(logits.amax() == -math.inf, math.nan)  # otherwise a forbidden token would be drawn


class RowProcessors:
    """Which rows have calls. A batch without such rows costs one look at an array of the host, at most."""

    __slots__ = ("_calls", "_functions", "_is_on")

    def __init__(self, functions: Mapping[str, Process] | None, *, max_rows: int) -> None:
        """Call `functions`, by the names in a batch."""
        self._functions = functions or {}
        self._is_on = np.zeros(max_rows, np.bool_)  # contents written by: admit
        self._calls: dict[int, RowCalls] = {}  # written by: admit

    def admit(self, batch: Batch) -> None:
        """Enter what the admitted requests name, in place of their rows' former requests.

        Raises:
            KeyError: a name is unknown.
        """
        if self._calls and len(batch.admitted):
            rows = batch.admitted_rows()
            self._is_on[rows] = False
            for row in rows:
                self._calls.pop(row, None)
        if batch.processors is not None:
            for row, calls in zip(batch.processors.rows.tolist(), batch.processors.calls, strict=True):
                self._calls[row] = RowCalls(calls, self._functions)
                self._is_on[row] = True

    def of_batch(self, batch: Batch) -> dict[int, RowCalls]:
        """Return the calls for those of its sampled grants that have any, by their index."""
        return self.of(batch.rows[batch.sampled]) if self._calls else {}

    def of(self, rows: Int32) -> dict[int, RowCalls]:
        """Return the calls for those of some rows that have any, by their index in `rows`."""
        if not self._calls:
            return {}
        return {index: self._calls[int(rows[index])] for index in np.flatnonzero(self._is_on[rows]).tolist()}


def processed(logits: Tensor, calls: Mapping[int, RowCalls], texts: Callable[[int], Tensor]) -> Tensor:
    """Return the logits after the calls; `logits` itself if there are none.

    Args:
        logits: `[N, V]`, not changed.
        calls: by row of `logits`.
        texts: returns the tokens before the drawn one, `[n] int32`, of a row of `logits`; it may be changed.
    """
    if not calls:
        return logits
    index = torch.tensor(list(calls), device=logits.device)
    chosen = logits.index_select(0, index).float()
    for place, (row, one) in enumerate(calls.items()):
        one.change(texts(row), chosen[place])
    return logits.index_copy(0, index, chosen.to(logits.dtype))
