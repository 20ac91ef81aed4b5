"""The answers to `/generate`: one JSON body, or a stream of what is new."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from pagewood.server import wire
from pagewood.server.errors import ApiError
from pagewood.server.formats import EVENTS, Choice, Tally, Usage, event
from pagewood.server.native.answers import Answer, EndReason, MetaInfo, Timings, TokenLogprob
from pagewood.server.openai.logprobs import LOWEST
from pagewood.server.token_ids import ids_of


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeFormat:
    """The answers to one request."""

    id: str
    is_array: bool
    """Whether there may be several."""
    logprobs: bool = False
    """Whether answers have log probabilities."""
    num_top: int = 0
    """Most probable tokens that are shown in the place of each."""
    prompt_start: int | None = None
    """First prompt token whose log probability is shown; None: of none."""
    shows_pieces: bool = False
    """Whether tokens with log probabilities have their text."""
    received_s: float | None = None
    """Unix time, seconds; None: answers have no times."""

    media_type: ClassVar[str] = EVENTS

    def stream(self, usage: Callable[[], Usage]) -> NativeStream:
        """Return a new stream."""
        return NativeStream(self)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Return the complete answers."""
        found = [
            Answer(
                text=choice.text,
                output_ids=choice.ids,
                meta_info=self.meta(
                    choice.tally,
                    finish=choice.finish,
                    tokens=choice.tokens,
                    prompt=choice.prompt,
                    times=(_unix_s(choice.first_s), _unix_s(choice.last_s)),
                ),
                index=index if self.is_array else msgspec.UNSET,
            )
            for index, choice in enumerate(choices)
        ]
        return msgspec.json.encode(found if self.is_array else found[0])

    def meta(
        self,
        tally: Tally,
        *,
        finish: str,
        tokens: Sequence[wire.TokenEntry],
        prompt: Sequence[wire.TokenEntry] | None,
        times: tuple[float | None, float | None],
    ) -> MetaInfo:
        """Return what is known of an answer.

        Args:
            tally: its counts so far.
            finish: why it ended; empty: it has not ended.
            tokens: new ones, with their log probabilities.
            prompt: the tokens of its prompt; None: they are not shown here.
            times: when its first token came, and when it ended (None: it has not), Unix time in seconds.
        """
        reason = None
        if finish == "length":
            reason = EndReason(type="length", length=tally.num_output_tokens)
        elif finish:
            reason = EndReason(type="stop")
        found = MetaInfo(
            id=self.id,
            finish_reason=reason,
            prompt_tokens=tally.num_prompt_tokens,
            completion_tokens=tally.num_output_tokens,
            cached_tokens=tally.num_cached_tokens,
        )
        if self.logprobs:
            found = msgspec.structs.replace(
                found,
                output_token_logprobs=[self._chosen(entry) for entry in tokens],
                output_top_logprobs=[self._top(entry) for entry in tokens] if self.num_top else msgspec.UNSET,
            )
            if self.prompt_start is not None and prompt is not None:
                shown = prompt[self.prompt_start :]
                found = msgspec.structs.replace(
                    found,
                    input_token_logprobs=[self._chosen(entry) for entry in shown],
                    input_top_logprobs=[self._top(entry) if entry.rank else None for entry in shown]
                    if self.num_top
                    else msgspec.UNSET,
                )
        if self.received_s is None:
            return found
        first_s, last_s = times
        timings = Timings(received_s=self.received_s, first_token_s=first_s or self.received_s, finished_s=last_s)
        return msgspec.structs.replace(found, timings=timings)

    def _chosen(self, entry: wire.TokenEntry) -> TokenLogprob:
        token, logprob, text = self._token(entry.chosen)
        return (logprob if entry.rank else None, token, text)

    def _top(self, entry: wire.TokenEntry) -> list[TokenLogprob]:
        found = [self._token(one) for one in entry.top[: self.num_top]]
        return [(logprob, token, text) for token, logprob, text in found]

    def _token(self, one: wire.ScoredToken) -> tuple[int, float, str | None]:
        text = one.data.decode(errors="replace") if self.shows_pieces else None
        return one.token, max(one.logprob, LOWEST), text


def _unix_s(monotonic_s: float | None) -> float | None:
    return None if monotonic_s is None else monotonic_s + time.time() - time.monotonic()


class NativeStream:
    """The server-sent events of one request: each has what is new of one answer."""

    __slots__ = ("_first_s", "_format", "_tallies")

    def __init__(self, format: NativeFormat) -> None:
        self._format = format
        self._tallies: dict[int, Tally] = {}  # written by: take
        self._first_s: dict[int, float] = {}  # written by: take

    def take(self, index: int, answer: wire.Answer) -> bytes:
        """Return the event of one message."""
        format = self._format
        tally = self._tallies.setdefault(index, Tally())
        tally.add(answer)
        is_first = index not in self._first_s
        if is_first:
            self._first_s[index] = time.time()
        logprobs = answer.logprobs
        meta = format.meta(
            tally,
            finish="" if answer.finish is None else answer.finish.value,
            tokens=() if logprobs is None else logprobs.tokens,
            prompt=None if logprobs is None else logprobs.prompt,
            times=(self._first_s[index], None if answer.finish is None else time.time()),
        )
        new = Answer(
            text=answer.text,
            output_ids=ids_of(answer.tokens),
            meta_info=meta,
            index=index if format.is_array else msgspec.UNSET,
        )
        return event(msgspec.json.encode(new))

    def end(self) -> bytes:
        """Return the last event."""
        return event(b"[DONE]")

    def fail(self, error: ApiError) -> bytes:
        """Return the event with an error."""
        return event(error.body())
