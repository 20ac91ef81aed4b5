"""The prompts of requests as requests of their own, for the replicas that only compute prompts."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pagewood.engine.api import Abort, FinishReason, SamplingParams, Submit
from pagewood.server.messages import wire
from pagewood.server.messages.token_ids import num_ids
from pagewood.server.replicas.placed_request import Helped, PlacedRequest

_NO_TEXT = wire.encode(wire.TextOptions())


class PromptsApart:
    """The prompts that replicas compute for others.

    Invariant: a prompt is here from `begin` until its replica has ended it or is lost, also if no request waits for it
    any more. While a request waits for one, `PlacedRequest.helped` names it.

    Args:
        send: sends a frame to the replica with that number.
    """

    __slots__ = ("_num_named", "_open", "_send")

    def __init__(self, send: Callable[[int, bytes], None]) -> None:
        self._send = send
        self._num_named = 0  # written by: name
        self._open: dict[str, tuple[int, PlacedRequest | None]] = {}  # written by: PromptsApart
        """By their id, the replica, and the request that waits; None: it waits no more."""

    def __contains__(self, request_id: str) -> bool:
        """Return whether answers with that id are those to a prompt."""
        return request_id in self._open

    def name(self, entry: PlacedRequest, replica: int) -> None:
        """Name the replica that will compute the prompt of a request."""
        self._num_named += 1
        entry.helped = Helped(request_id=f"prompt-{self._num_named}", replica=replica)

    def begin(self, entry: PlacedRequest) -> bool:
        """Send the named replica the prompt of a request; return False, and name none, if it is not to be apart."""
        assert entry.helped is not None
        assert entry.frame is not None
        request_id, replica = entry.helped.request_id, entry.helped.replica
        prompt = prompt_only(entry.frame, request_id=request_id)
        if prompt is None:
            entry.helped = None
            return False
        self._open[request_id] = replica, entry
        self._send(replica, prompt)
        return True

    def ended(self, request_id: str) -> PlacedRequest | None:
        """Note that a replica has ended a prompt; return the request that waited for it, if it still does."""
        _, entry = self._open.pop(request_id)
        if entry is not None:
            entry.helped = None
        return entry

    def withdraw(self, entry: PlacedRequest) -> None:
        """Stop the computation of a prompt for which its request waits no more."""
        helped, entry.helped = entry.helped, None
        if helped is not None and helped.request_id in self._open:
            self._open[helped.request_id] = helped.replica, None
            self._send(helped.replica, wire.encode(Abort(request_id=helped.request_id)))

    def lost(self, replica: int) -> None:
        """Forget the prompts of a replica that is lost. The caller sends the requests that wait for them elsewhere."""
        self._open = {request_id: one for request_id, one in self._open.items() if one[0] != replica}

    def clear(self) -> None:
        """Forget all prompts: no answer to them will come."""
        self._open.clear()


def prompt_only(frame: bytes, *, request_id: str) -> bytes | None:
    """Return the frame of a request that computes the tokens of another one, and puts them into the shared store.

    Its tokens are those of the prompt and of the answer so far, and it may become as long, because some models choose
    the form of their KV by that.

    Args:
        frame: the `Submit` of the other request.
        request_id: of the new one.

    Returns:
        None if the replica of the request must compute the prompt itself: it needs the results of all positions, makes
        a vector, or wants to know first what is cached.
    """
    submit = wire.engine_commands.decode(frame)
    assert isinstance(submit, Submit)
    most = submit.sampling.max_tokens
    if (
        submit.pooling is not None
        or submit.sampling.prompt_logprobs is not None
        or submit.sampling.routed_experts_from is not None
        or submit.sampling.hidden_states_from is not None
        or submit.cache_hit_threshold
        or submit.handover == "await"
    ):
        return None
    return wire.encode(
        msgspec.structs.replace(
            submit,
            request_id=request_id,
            tokens=submit.tokens + submit.output,
            output=b"",
            sampling=SamplingParams(
                max_tokens=None if most is None else most - num_ids(submit.output), temperature=0.0
            ),
            carry=_NO_TEXT,
            handover=None,
            explain=False,
            explain_admission=False,
            is_search=False,
            is_paused=False,
            names=(),
        )
    )


def has_computed(answer: wire.Answer) -> bool:
    """Return whether the last answer to such a request says that its prompt was computed."""
    return answer.refusal is None and answer.finish in (FinishReason.STOP, FinishReason.LENGTH)
