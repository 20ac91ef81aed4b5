"""The requests of one HTTP request, and the answers that its reader waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pagewood.engine.api import FinishReason
from pagewood.server.http.errors import failed
from pagewood.server.keys.caller import Caller
from pagewood.server.keys.quota import Quota
from pagewood.server.messages import wire
from pagewood.server.requests.answer_queue import AnswerQueue, Take

HoldMode = Literal["in_place", "retract", "resume"]
"""A kind of pause, or its end."""


@dataclass(slots=True, kw_only=True, eq=False)
class LiveGroup:
    """The requests of one HTTP request. `next` returns its answers, each with the index of its request.

    The requests are those of the first prompt, in the order of its answers, then those of the next prompt.
    """

    prompt_param: str
    """The client's name of the prompt field."""
    grammar_param: str | None = None
    """The client's name of the field with the grammar; None: it sent none."""
    param_names: Mapping[str, str] = field(default_factory=dict[str, str])
    """The client's names of further fields of the engine, where they differ."""
    names: frozenset[str] = frozenset()
    """Names by which a client may refer to the HTTP request."""
    caller: Caller = field(default_factory=Caller)
    """The caller that sent it."""
    quota: Quota | None = None  # written by: LiveRequests
    """The quota of its key, which counts it until it is closed."""
    engine_ids: list[str] = field(default_factory=list[str])  # written by: LiveRequests
    """Ids of its first requests, and those that requests got when they were sent again."""
    queue: AnswerQueue = field(default_factory=AnswerQueue)
    open_ids: set[str] = field(default_factory=set[str])  # written by: LiveRequests
    """Requests of this group that still wait for their last answer."""
    room: int = 0
    """Most requests that it may have at a time, if it gets further ones; 0: it gets none."""
    priority: int | None = None  # written by: LiveRequests
    """Priority of further requests, and of those that are sent again, if it was changed."""
    is_sending: bool = False  # written by: respond
    """Whether its reader waits for its client, which has not taken what was sent. A client for which no reader waits is
    not slow: its answer is large, or is collected because it is sent whole."""
    hold: HoldMode | None = None  # written by: LiveRequests
    """Its latest pause or resumption; None: it was never paused."""
    deadline: asyncio.TimerHandle | None = None  # written by: LiveRequests
    """Ends it when its time is over; None: it has no deadline."""
    shows_partial: bool = False
    """Whether its reader gets what there is of an answer that was aborted, instead of an error."""
    # written by: service
    may_repeat: bool = False
    """Whether its requests are sent again if a process dies that holds them."""

    @property
    def is_paused(self) -> bool:
        """Whether further requests, and those that are sent again, begin paused."""
        return self.hold not in (None, "resume")

    async def next(self, take: Take | None = None) -> tuple[int, wire.Answer]:
        """Wait for the next answer that `take` does not take at once; it must take no answer with a `finish`.

        Raises:
            ApiError: a request of the group was refused, or is lost with a process that held it.
            Exception: `take` has failed.
        """
        item = await self.queue.get(take)
        if isinstance(item, Exception):
            raise item
        index, answer = item
        if answer.finish is FinishReason.ABORT and self.shows_partial:
            return index, answer
        if answer.finish is not None:
            names = {"prompt": self.prompt_param, "grammar": self.grammar_param, **self.param_names}
            error = failed(answer.finish, answer.refusal, names=names)
            if error is not None:
                raise error
        return index, answer
