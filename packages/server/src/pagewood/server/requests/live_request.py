"""One request that a client waits for, and what is kept of it so that it can be sent again behind what it has had."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from pagewood.engine.api import MAX_KEPT_TOKENS
from pagewood.engine.seeds import answer_seed
from pagewood.server.messages import wire
from pagewood.server.requests.live_group import LiveGroup

HELD = -1
"""Stands for a tokenizer: the request has not been sent, and waits in `Held`."""
SETTLED_ANSWERS = 8
"""After that many answers a request has got on. When an engine dies, its last steps may not have been answered."""

ALL_KEPT = MAX_KEPT_TOKENS
"""As many ids as a request may ask for."""


@dataclass(slots=True, kw_only=True, eq=False)
class LiveRequest:
    """A request from its arrival until the end of its answer."""

    group: LiveGroup
    index: int
    """In its group."""
    place: int
    """Among the answers to its prompt."""
    frame: bytes | None
    """The message of its prompt, shared by all answers to it; None: it is not sent again."""
    tokenizer: int = HELD  # written by: LiveRequests
    """Index of the tokenizer that it was sent to, or `HELD`."""
    output: array[int] = field(default_factory=lambda: array("i"))  # contents written by: LiveRequests
    """The tokens that it has had, if it may be sent again: what its reader got, and nothing more."""
    num_cached_tokens: int = 0  # written by: LiveRequests
    """What its first answer said of its prompt."""
    num_kept: int = 0  # written by: note_kept
    """Ids that the filters left for the tokens that it has had; `ALL_KEPT`: they are not reported any more."""
    num_deaths: int = 0  # written by: LiveRequests
    """Deaths of processes that held it, since it last got on."""
    num_answers: int = 0  # written by: LiveRequests
    """Answers since it was sent; counted up to `SETTLED_ANSWERS` only."""
    is_settled: bool = False  # written by: LiveRequests
    """Whether it was answered, and has got on if a process died that held it."""

    @property
    def answered(self) -> bool:
        """Whether it has had an answer since it was sent, so that it has left its tokenizer."""
        return self.num_answers > 0

    def note_kept(self, tokens: Sequence[wire.TokenEntry]) -> None:
        """Count what the filters left for new tokens."""
        for entry in tokens if self.num_kept < ALL_KEPT else ():
            self.num_kept = ALL_KEPT if entry.kept is None else self.num_kept + len(entry.kept) // 4


def messages_again(requests: Mapping[str, LiveRequest]) -> list[wire.Generate | wire.Encode]:
    """Return the messages that send requests again, given by their new ids: one for all answers to a prompt.

    They have the seeds and the tokens that the requests had, and the priority and the pause that their groups have now.
    """
    prompts: dict[tuple[int, int], list[tuple[str, LiveRequest]]] = {}
    for request_id, request in requests.items():
        prompts.setdefault((id(request.group), request.index - request.place), []).append((request_id, request))
    return [_again(answers) for answers in prompts.values()]


def _again(answers: Sequence[tuple[str, LiveRequest]]) -> wire.Generate | wire.Encode:
    (request_id, request), *others = answers
    assert request.frame is not None
    message = wire.to_tokenizer.decode(request.frame)
    if not isinstance(message, wire.Generate):
        assert isinstance(message, wire.Encode)
        return msgspec.structs.replace(message, request_id=request_id)
    sampling, group = message.options.sampling, request.group
    if request.place or request.output:  # the first answer to a prompt has its log probabilities, and was sent
        sampling = replace(sampling, prompt_logprobs=None)
    message = message.with_options(
        sampling=sampling,
        is_paused=group.is_paused,
        priority=message.options.priority if group.priority is None else group.priority,
    )
    return msgspec.structs.replace(
        message,
        request_id=request_id,
        sibling_ids=tuple(name for name, _ in others),
        begun=tuple(_begun(one, message) for _, one in answers),
    )


def _begun(request: LiveRequest, message: wire.Generate) -> wire.Begun:
    """Return what a request has had; a step of a search has its sequence, and one answer, which ends it."""
    seed = message.options.sampling.seed
    return wire.Begun(
        output=request.output.tobytes() or (message.begun[request.place].output if message.begun else b""),
        seed=None if seed is None else answer_seed(seed, request.place),
        num_cached_tokens=request.num_cached_tokens,
        num_kept=request.num_kept,
    )
