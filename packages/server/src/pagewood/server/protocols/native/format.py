"""The answers to `/generate`: one JSON body, or a stream of new parts."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import msgspec
import numpy as np

from pagewood.engine.api import Explanation, RequestTimings
from pagewood.engine.weight_spans import FIRST_VERSION
from pagewood.server.http.errors import ApiError
from pagewood.server.messages import wire
from pagewood.server.messages.token_ids import ids_of
from pagewood.server.protocols.common.formats import EVENTS, Choice, InnerRows, Tally, Usage, event, kept_of
from pagewood.server.protocols.common.logprobs import LOWEST
from pagewood.server.protocols.common.timings import Chunk
from pagewood.server.protocols.native.answers import (
    Answer,
    CacheExplanation,
    EndReason,
    MetaInfo,
    Timings,
    TokenLogprob,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeFormat:
    """The answers to one request."""

    id: str
    is_array: bool
    """Whether there may be several answers."""
    logprobs: bool = False
    """Whether answers have log probabilities."""
    num_top: int = 0
    """Most probable tokens that are shown in the place of each."""
    prompt_start: int | None = None
    """First prompt token whose log probability is shown; None: none is shown."""
    shows_pieces: bool = False
    """Whether tokens with log probabilities have their text."""
    received_s: float | None = None
    """When the request came, on the clock of `time.monotonic`; None: answers have no times."""
    has_kept: bool = False
    """Whether answers have what the filters have left for each of their tokens."""
    explains: bool = False
    """Whether answers report the cached part of their prompt, and the time of their admission."""
    unix_offset_s: float = field(default_factory=lambda: time.time() - time.monotonic())
    """Unix time minus the time of that clock, which is that of the engine's process, too."""

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
                meta_info=self.explained(
                    self.meta(
                        choice.tally,
                        finish=choice.finish,
                        tokens=choice.tokens,
                        prompt=choice.prompt,
                        times=(choice.first_s, choice.last_s),
                        explanation=choice.explanation,
                        timings=choice.timings,
                        rows=choice.rows,
                    ),
                    choice.explanation,
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
        explanation: Explanation | None,
        timings: RequestTimings | None,
        rows: InnerRows,
    ) -> MetaInfo:
        """Return the data of an answer besides its text.

        Args:
            tally: its counts so far.
            finish: why it ended; empty: it has not ended.
            tokens: new ones, with their log probabilities.
            prompt: the tokens of its prompt; None: they are not shown here.
            times: when its first token came, and when it ended (None: it has not), seconds on the clock of
                `time.monotonic`.
            explanation: when it was queued and admitted; None: not shown.
            timings: when its prompt was computed and it was preempted; None: not shown.
            rows: what was computed at its positions, which is shown when it has ended.
        """
        reason = None
        if finish == "length":
            reason = EndReason(type="length", length=tally.num_output_tokens)
        elif finish:
            kinds: dict[str, Literal["cache_threshold", "abort"]] = {
                "cache_threshold": "cache_threshold",
                "abort": "abort",
            }
            reason = EndReason(type=kinds.get(finish, "stop"))
        versions = tally.weight_versions
        found = MetaInfo(
            id=self.id,
            finish_reason=reason,
            prompt_tokens=tally.num_prompt_tokens,
            completion_tokens=tally.num_output_tokens,
            cached_tokens=tally.num_cached_tokens,
            weight_version=versions[-1].version if versions else FIRST_VERSION,
            weight_versions=versions,
        )
        if self.has_kept and (kept := kept_of(tokens)) is not None:
            offsets = np.cumsum([0, *map(len, kept)], dtype="<i4") // 4
            found = msgspec.structs.replace(
                found,
                top_p_token_ids=b64encode(b"".join(kept)).decode(),
                top_p_token_offsets=b64encode(offsets.tobytes()).decode(),
            )
        if finish:
            found = _with_rows(found, rows)
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
        if not self.explains:
            explanation = None
        shown = Timings(
            received_s=self._unix(self.received_s),
            queued_s=msgspec.UNSET if explanation is None else self._unix(explanation.arrived_s),
            admitted_s=msgspec.UNSET if explanation is None else self._unix(explanation.admitted_s),
            first_token_s=self._unix(self.received_s if first_s is None else first_s),
            finished_s=None if last_s is None else self._unix(last_s),
        )
        if timings is not None:
            shown = msgspec.structs.replace(
                shown,
                chunks=tuple(Chunk(planned_s=self._unix(at_s), tokens=num) for at_s, num in timings.chunks),
                preempted_s=tuple(map(self._unix, timings.preempted_s)),
            )
        return msgspec.structs.replace(found, timings=shown)

    def explained(self, meta: MetaInfo, explanation: Explanation | None) -> MetaInfo:
        """Return the data of an answer, with the reason why no more of its prompt was cached, if known."""
        if explanation is None or not self.explains:
            return meta
        prefix = explanation.prefix
        cache = CacheExplanation(
            cause=prefix.cause,
            reusable_tokens=prefix.num_reusable_tokens,
            cached_tokens=prefix.num_tokens,
            first_difference=prefix.first_difference,
            possible_tokens=prefix.num_possible_tokens,
            evicted_by=prefix.evicted_by,
            evicted_at_s=None if prefix.evicted_s is None else self._unix(prefix.evicted_s),
        )
        return msgspec.structs.replace(meta, cache=cache)

    def _unix(self, monotonic_s: float) -> float:
        return monotonic_s + self.unix_offset_s

    def _chosen(self, entry: wire.TokenEntry) -> TokenLogprob:
        token, logprob, text = self._token(entry.chosen)
        return (logprob if entry.rank else None, token, text)

    def _top(self, entry: wire.TokenEntry) -> list[TokenLogprob]:
        found = [self._token(one) for one in entry.top[: self.num_top]]
        return [(logprob, token, text) for token, logprob, text in found]

    def _token(self, one: wire.ScoredToken) -> tuple[int, float, str | None]:
        text = one.data.decode(errors="replace") if self.shows_pieces else None
        return one.token, max(one.logprob, LOWEST), text


def _with_rows(meta: MetaInfo, rows: InnerRows) -> MetaInfo:
    """Return the data of an answer that has ended, with what was computed at its positions."""
    experts, states = rows.experts, rows.states
    if experts is not None:
        first = meta.prompt_tokens + meta.completion_tokens - 1 - experts.shape[0]
        encoded = b64encode(experts.data).decode()
        meta = msgspec.structs.replace(meta, routed_experts=encoded, routed_experts_start_len=first)
    if states is not None:
        vectors: list[list[float]] = np.frombuffer(states.data, "<f4").reshape(states.shape).tolist()
        num = max(0, len(vectors) - meta.completion_tokens + 1)
        meta = msgspec.structs.replace(meta, hidden_states=[vectors[:num], *vectors[num:]])
    return meta


class NativeStream:
    """The server-sent events of one request: each has the new part of one answer."""

    __slots__ = ("_explanations", "_first_s", "_format", "_rows", "_tallies")

    def __init__(self, format: NativeFormat) -> None:
        self._format = format
        self._tallies: dict[int, Tally] = {}  # written by: take
        self._first_s: dict[int, float] = {}  # written by: take
        self._explanations: dict[int, Explanation] = {}  # written by: take
        self._rows: dict[int, InnerRows] = {}  # written by: take

    def take(self, index: int, answer: wire.Answer) -> bytes:
        """Return the event of one message."""
        format = self._format
        tally = self._tallies.setdefault(index, Tally())
        tally.add(answer)
        if index not in self._first_s:
            self._first_s[index] = time.monotonic()
        if answer.explanation is not None:
            self._explanations[index] = answer.explanation
        rows = self._rows.setdefault(index, InnerRows())
        rows.add(answer)
        logprobs = answer.logprobs
        meta = format.meta(
            tally,
            finish="" if answer.finish is None else answer.finish.value,
            tokens=() if logprobs is None else logprobs.tokens,
            prompt=None if logprobs is None else logprobs.prompt,
            times=(self._first_s[index], None if answer.finish is None else time.monotonic()),
            explanation=self._explanations.get(index),
            timings=answer.timings,
            rows=rows,
        )
        new = Answer(
            text=answer.text,
            output_ids=ids_of(answer.tokens),
            meta_info=format.explained(meta, answer.explanation),
            index=index if format.is_array else msgspec.UNSET,
        )
        return event(msgspec.json.encode(new))

    def end(self) -> bytes:
        """Return the last event."""
        return event(b"[DONE]")

    def fail(self, error: ApiError) -> bytes:
        """Return the event with an error."""
        return event(error.body())
