"""Calls logits processors between two runs of the program, on its logits and on the text of each verified position.

Legend: G grants, S sampled grants, T tokens of the pass, W wanted tokens, V vocab_size.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.runner.cpu.compiled.layout import Column
from pagewood.engine.runner.cpu.program.passes import Grants
from pagewood.engine.runner.cpu.program.tape import MeasuredRun, Run, integers_at
from pagewood.engine.runner.processors import RowCalls
from pagewood.engine.runner.worker import Later


@dataclass(frozen=True, slots=True, kw_only=True)
class Processing:
    """The calls of a step, after the logits have been changed in all other ways."""

    calls: Mapping[int, RowCalls]
    """By the batch's sampled grants."""
    rest: Later[Run | MeasuredRun | None] = field(default_factory=Later)
    """The instructions behind the calls; None: there are none."""

    def change(
        self, logits: NDArray[np.float32], scope: NDArray[np.int64], grants: Grants, kept: Int32 | None, tokens: Int32
    ) -> None:
        """Change the logits of all wanted tokens of grants with calls.

        Args:
            logits: `[>= W, V]`, changed.
            scope: the row of the table of scopes; the program has run up to the logits.
            grants: that are computed.
            kept: `[S]`, which of the batch's sampled grants these are; None: all.
            tokens: `[rows, positions]`, the table of tokens.
        """
        num_sampled = len(grants.sampled)
        offsets = integers_at(scope[Column.OFFSETS], len(grants.rows) + 1)
        starts = integers_at(scope[Column.STARTS], len(grants.rows))
        firsts = integers_at(scope[Column.FIRSTS], num_sampled + 1)
        places = range(num_sampled) if kept is None else kept.tolist()
        with torch.inference_mode():
            for s, index in enumerate(places):
                calls = self.calls.get(index)
                if calls is None:
                    continue
                g, first, end = int(grants.sampled[s]), int(firsts[s]), int(firsts[s + 1])
                own = integers_at(scope[Column.TOKENS] + 4 * int(offsets[g]), int(offsets[g + 1] - offsets[g]))
                known = tokens[grants.rows[g], : starts[g] + 1]
                for j in range(end - first):
                    last = len(own) - (end - first) + j
                    text = np.concatenate([known, own[1 : last + 1]])
                    calls.change(torch.from_numpy(text), torch.from_numpy(logits[first + j]))
