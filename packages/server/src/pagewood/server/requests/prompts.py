"""The messages of new requests, before they are sent."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pagewood.server.http.errors import ApiError
from pagewood.server.keys.caller import Caller
from pagewood.server.messages import wire


def priority_of(prompt: wire.NewRequest) -> int:
    """Return the priority of a request; of texts that are only tokenized, 0."""
    return prompt.options.priority if isinstance(prompt, wire.Generate) else 0


def is_computed(prompt: wire.NewRequest) -> bool:
    """Return whether the engine computes something for a message. It may be sent twice; commands change the engine."""
    return isinstance(prompt, wire.Generate | wire.Encode)


def paused(prompts: Sequence[wire.NewRequest]) -> list[wire.NewRequest]:
    """Return requests that begin paused."""
    return [one.with_options(is_paused=True) if isinstance(one, wire.Generate) else one for one in prompts]


def stamped(caller: Caller, prompts: Sequence[wire.NewRequest]) -> list[wire.NewRequest]:
    """Return prompts with their tenant and with the group that they belong to."""
    of_caller = [caller.stamped(prompt) for prompt in prompts]
    if len(of_caller) == 1:
        return of_caller
    return [
        msgspec.structs.replace(prompt, group_id=of_caller[0].request_id)
        if isinstance(prompt, wire.Generate)
        else prompt
        for prompt in of_caller
    ]


def frames_of(prompts: Sequence[wire.NewRequest]) -> list[bytes]:
    """Return the frame of each prompt.

    Raises:
        ApiError: a chat template's variable, a document or a tool has a value that no message can carry.
    """
    try:
        return [wire.encode(prompt) for prompt in prompts]
    except (OverflowError, RecursionError) as error:
        raise ApiError(
            "Integers in the request must be in [-2**63, 2**64), and objects not nested too deeply.",
            code="invalid_value",
        ) from error
