"""One request as the router of the replicas sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagewood.engine.api import PauseRequest, ResumeRequest
from pagewood.schedpolicy.routing.placement import Ticket
from pagewood.server.messages import wire


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
    block_hashes: Sequence[bytes]  # written by: Dispatcher
    frame: bytes | None  # written by: Dispatcher
    """Its `Submit`; None: it comes again from a tokenizer, with the tokens that it has had."""
    num_matched: int = 0  # written by: router
    ticket: Ticket | None = None  # written by: Dispatcher
    """None: it waits for a place."""
    is_computed: bool = False  # written by: Dispatcher
    """Whether a token has come from its replica."""
    hold: PauseRequest | ResumeRequest | None = None  # written by: Dispatcher
    """The latest pause or resumption, which its engine gets behind it; None: there is none, or the engine has it."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return self.num_prompt + self.num_generated


def names_of(block_hashes: bytes) -> list[bytes]:
    """Return the names of blocks that a message carries."""
    return [block_hashes[at : at + wire.HASH_BYTES] for at in range(0, len(block_hashes), wire.HASH_BYTES)]
