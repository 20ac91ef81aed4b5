"""A record of the steps that an engine computes while it is watched."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.steps.grant import Grant
from pagewood.engine.observe.view import StepView

_MAX_STEPS = 4096
"""Most steps recorded between two reads; later ones are left out."""


class StepRecord:
    """Steps since the last `take`, and how often pages were found in the cache. It holds no request.

    Args:
        num_pages: of the KV memory.
        page_size: tokens.
    """

    __slots__ = ("_ended_s", "_first_tokens_s", "_page_size", "_steps", "hits")

    def __init__(self, *, num_pages: int, page_size: int) -> None:
        self.hits: Int32 = np.zeros(num_pages, np.int32)
        """`[num_pages] int32`: with how many admissions each page came from the cache."""
        # contents written by: step_record
        self._page_size = page_size
        self._steps: list[StepView] = []  # written by: step_record
        self._first_tokens_s: list[float] = []  # written by: step_record
        self._ended_s = 0.0  # written by: step_record

    def ended(self, grants: Sequence[Grant], *, launched_s: float, now_s: float) -> None:
        """Note that a step has ended, before its requests are retired."""
        began_s, self._ended_s = max(launched_s, self._ended_s), now_s
        if not launched_s or len(self._steps) == _MAX_STEPS:  # it was launched before recording began
            return
        num_decodes = num_decode_tokens = num_prompt_tokens = num_admitted = num_cached = 0
        for grant in grants:
            if grant.num_promised and (grant.num_promised > 1 or grant.num_tokens == 1):
                num_decodes += 1
                num_decode_tokens += grant.num_tokens
            else:
                num_prompt_tokens += grant.num_tokens
            request = grant.request
            if grant.num_promised and not request.answered and request.finish is None:
                self._first_tokens_s.append(now_s - request.arrived_s)
            if grant.is_admitted:
                num_admitted += 1
                num_cached += grant.start
                self.hits[request.pages[: grant.start // self._page_size]] += 1
        self._steps.append(
            StepView(
                began_s=began_s,
                took_s=now_s - began_s,
                num_decodes=num_decodes,
                num_decode_tokens=num_decode_tokens,
                num_prompts=len(grants) - num_decodes,
                num_prompt_tokens=num_prompt_tokens,
                num_admitted=num_admitted,
                num_cached_tokens=num_cached,
            )
        )

    def take(self) -> tuple[tuple[StepView, ...], tuple[float, ...]]:
        """Return the steps and the times to the first token since the last call."""
        steps, first_tokens_s = tuple(self._steps), tuple(self._first_tokens_s)
        self._steps.clear()
        self._first_tokens_s.clear()
        return steps, first_tokens_s

    def forget_free(self, held_pages: Int32) -> None:
        """Forget the hits of free pages.

        Args:
            held_pages: `[num_held] int32`, ids of all other pages.
        """
        kept = self.hits[held_pages]
        self.hits[:] = 0
        self.hits[held_pages] = kept
