"""One request as the router of the replicas sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from pagewood.engine.api import PauseRequest, ResumeRequest
from pagewood.schedpolicy.routing.placement import Ticket
from pagewood.server.messages import wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Helped:
    """The prompt of a request on a replica that only computes prompts."""

    request_id: str
    """Id of this part; the request has another one."""
    replica: int


@dataclass(slots=True, kw_only=True, eq=False)
class PlacedRequest:
    """A request from its way out of the tokenizer until its engine has ended it.

    Satisfies `schedpolicy.routing.placement.RoutedRequest`. Each stay on a replica has an id of its own, so what comes
    back under an earlier one belongs to no request.
    """

    request_id: str  # written by: Dispatcher
    arrival: int
    arrived_s: float
    priority: int  # written by: Dispatcher. While it is in no router only
    tenant: str
    num_prompt: int
    num_generated: int  # written by: Dispatcher
    max_new_tokens: int
    block_hashes: Sequence[int]  # written by: Dispatcher
    frame: bytes | None  # written by: Dispatcher
    """Its `Submit`; None: it comes again from a tokenizer, with the tokens that it has had."""
    num_matched: int = 0  # written by: router
    ticket: Ticket | None = None  # written by: Dispatcher
    """None: it waits for a place."""
    helped: Helped | None = None  # written by: Dispatcher, PromptsApart
    """Its prompt on the replica that computes it for another; None: none does."""
    is_computed: bool = False  # written by: Dispatcher
    """Whether a token has come from its replica."""
    limit: asyncio.TimerHandle | None = None  # written by: Dispatcher
    """Ends it if it waits too long for its first place; None: nothing does."""
    hold: PauseRequest | ResumeRequest | None = None  # written by: Dispatcher
    """The latest pause or resumption, which its engine gets behind it; None: there is none, or the engine has it."""

    @property
    def is_sent(self) -> bool:
        """Whether its replica has it. It has not while another one computes the prompt."""
        return self.ticket is not None and self.frame is not None and self.helped is None

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return self.num_prompt + self.num_generated


def hashes_of(block_hashes: bytes) -> list[int]:
    """Return the hashes of blocks that a message carries, in the form of the events of caches."""
    size = wire.HASH_BYTES
    return [int.from_bytes(block_hashes[at : at + size], "big") for at in range(0, len(block_hashes), size)]
