"""What one request computes in a step."""

from __future__ import annotations

from dataclasses import dataclass

from pagewood.engine.core.request import Request


@dataclass(slots=True, eq=False)
class Grant:
    """Compute positions [start, start + num_tokens) of a request.

    It must not be changed when it has been made. It is not a frozen dataclass because a step makes hundreds, and a
    frozen one takes three times as long to make.
    """

    request: Request  # written by: plan
    start: int  # written by: plan
    num_tokens: int  # written by: plan
    num_promised: int
    """The most tokens that it may yield; 0 if it ends before the last known token, as a chunk of a prompt does."""
    # written by: plan
    is_admitted: bool = False
    """Whether the request was admitted in this step, so its row is new to the runner."""  # written by: plan
