"""Which waiting requests one step can start, and how many tokens of each: memory and compute together."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from pagewood.schedpolicy.pages import round_up
from pagewood.schedpolicy.requests import Request, Running, Waiting
from pagewood.schedpolicy.verdict import FITS, Outcome, Verdict


class HasIgnoreEos(Protocol):
    """A request that may ignore the end-of-sequence token."""

    @property
    def ignores_eos(self) -> bool:
        """Whether it generates all `max_new_tokens`, whatever it samples."""
        ...


class WaitingForAdmission(Waiting, HasIgnoreEos, Protocol):
    """A waiting request, as `Admission` reads it."""


class RunningAdmitted(Running, HasIgnoreEos, Protocol):
    """A running request, as `Admission` reads it."""


class Room(Protocol):
    """The KV memory."""

    @property
    def num_available(self) -> int:
        """Tokens of KV memory available now: free ones, and cached ones that no request uses."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """Limits that are the same in every step.

    Attributes:
        page_size: Tokens of a page, >= 1.
        max_input_tokens: Prompt tokens of one step, >= 1; the first request may exceed it if prompts are not chunked.
        max_chunk_tokens: Prompt tokens of one step if prompts are chunked, >= page_size; None to leave them whole.
        max_request_tokens: Prompt tokens of one request in one step, >= page_size, so that a long prompt leaves room
            for others; None for no limit but the step's.
        max_partial: Chunked prompts in progress at once, >= 1; SGLang has 1.
        max_output_estimate: Most output tokens to reserve for one request; few requests generate more.
    """

    page_size: int
    max_input_tokens: int = 16_384
    max_chunk_tokens: int | None = None
    max_request_tokens: int | None = None
    max_partial: int = 1
    max_output_estimate: int = 4096

    def __post_init__(self) -> None:
        for name in ("page_size", "max_input_tokens", "max_partial"):
            value: int = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        for name in ("max_chunk_tokens", "max_request_tokens"):
            chunk: int | None = getattr(self, name)
            if chunk is not None and chunk < self.page_size:
                raise ValueError(f"{name} must be >= page_size ({self.page_size}), got {chunk}")
        if self.max_output_estimate < 0:
            raise ValueError(f"max_output_estimate must be >= 0, got {self.max_output_estimate}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What one request may compute in this step: a number of tokens, or 0 and the reason."""

    num_tokens: int
    is_cut: bool
    """Whether the prompt continues after them."""
    verdict: Verdict


class Admission:
    """The admission arithmetic of one step. Invariant: it never reserves more memory than is available.

    All numbers are in tokens. Four of them count what is left:

        remaining_total    memory after the expected output of running requests and all reservations of this step
        remaining_current  memory after the tokens that this step computes
        remaining_input    prompt tokens of this step
        remaining_chunk    prompt tokens of this step, if prompts are chunked

    A request is admitted if its uncached prompt, its whole estimated output and one page fit into `remaining_total`.
    If its prompt is cut, it reserves only the chunk: its output begins no earlier than its last chunk.

    Call `continue_prompt` for the prompts in progress, then `admit` in the order of the queue while `verdict` is
    CONTINUE.

    Source: `PrefillAdder` of SGLang, which allows one prompt in progress at a time; this allows `max_partial`.
    """

    __slots__ = (
        "_current_offset", "_has_admitted", "_has_reserved", "_limits", "_num_partial", "_room", "_total_offset",
        "remaining_chunk", "remaining_input",
    )  # fmt: skip

    def __init__(
        self,
        limits: AdmissionLimits,
        *,
        room: Room,
        running: Iterable[RunningAdmitted],
        new_token_ratio: float,
        num_decodes: int = 0,
        num_partial: int = 0,
    ) -> None:
        """Begin a step.

        Args:
            limits: Limits that are the same in every step.
            room: The memory; read again at every check, because locking a cached prefix makes less available.
            running: Requests whose prompts are computed.
            new_token_ratio: Part of their allowed output that they are expected to generate, in [0, 1].
            num_decodes: Number of these that decode in this step, and so use part of its compute.
            num_partial: Requests whose prompts are in progress.

        Raises:
            ValueError: `new_token_ratio`, `num_decodes` or `num_partial` is out of range.
        """
        if not 0 <= new_token_ratio <= 1:
            raise ValueError(f"new_token_ratio must be in [0, 1], got {new_token_ratio}")
        if num_decodes < 0:
            raise ValueError(f"num_decodes must be >= 0, got {num_decodes}")
        if num_partial < 0:
            raise ValueError(f"num_partial must be >= 0, got {num_partial}")
        self._limits = limits
        self._room = room
        expected = math.fsum(
            self._output_estimate(request) * (1.0 if request.ignores_eos else new_token_ratio) for request in running
        )
        self._total_offset = num_decodes + expected  # written by: _reserve
        self._current_offset = num_decodes  # written by: _reserve
        self._has_admitted = False  # written by: admit
        self._has_reserved = False  # written by: _reserve
        self._num_partial = num_partial  # still in progress after this step; written by: admit, continue_prompt
        self.remaining_input = limits.max_input_tokens - num_decodes  # written by: _reserve
        chunk = limits.max_chunk_tokens
        self.remaining_chunk = None if chunk is None else chunk - num_decodes  # written by: _reserve

    @property
    def remaining_total(self) -> float:
        """Tokens of memory left after expected outputs and all reservations."""
        return self._room.num_available - self._total_offset

    @property
    def remaining_current(self) -> int:
        """Tokens of memory left after this step."""
        return self._room.num_available - self._current_offset

    @property
    def verdict(self) -> Verdict:
        """Whether another request may fit; `remaining_current` needs no check, it is never below `remaining_total`."""
        if self.remaining_total <= 0:
            return _no_token("remaining_total", 1, self.remaining_total)
        if self.remaining_input <= 0:
            return _other("remaining_input", 1, self.remaining_input)
        if self.remaining_chunk is not None and self.remaining_chunk <= 0:
            return _other("remaining_chunk", 1, self.remaining_chunk)
        return FITS

    def admit(self, request: WaitingForAdmission) -> Chunk:
        """Reserve what a waiting request needs, or nothing and return the reason.

        Lock the request's cached prefix before the call, so that it no longer counts as available.
        """
        limits = self._limits
        num_uncached = request.num_tokens - request.num_matched
        num_output = self._output_estimate(request)
        wanted = num_uncached + num_output + limits.page_size
        if wanted >= self.remaining_total:
            return _nothing(_no_token("remaining_total", wanted, self.remaining_total))
        chunk = self._chunk(request.num_matched, num_uncached)
        if chunk.num_tokens:
            self._has_admitted = True
            self._num_partial += chunk.is_cut
            self._reserve(chunk.num_tokens, 0 if chunk.is_cut else num_output)
        return chunk

    def continue_prompt(self, request: WaitingForAdmission, *, num_computed: int) -> Chunk:
        """Reserve the next chunk of a prompt in progress.

        The first prompt of a step makes progress even if the memory is reserved for others, as long as there is any: a
        reservation is an estimate, and a prompt without progress holds its memory for nothing.

        Args:
            request: One of those counted in `num_partial`.
            num_computed: Its tokens whose KV is in memory.
        """
        num_left = request.num_tokens - num_computed
        memory = math.floor(self.remaining_total)
        if memory <= 0 and not self._has_reserved:
            memory = self.remaining_current
        chunk = self._chunk(num_computed, num_left, most=memory, is_partial=True)
        if chunk.num_tokens:
            self._num_partial -= not chunk.is_cut
            self._reserve(chunk.num_tokens, 0 if chunk.is_cut else self._output_estimate(request))
        return chunk

    def _chunk(self, num_before: int, num_left: int, *, most: float = math.inf, is_partial: bool = False) -> Chunk:
        """Return how much of a prompt this step computes; a cut is at the end of a page."""
        limits = self._limits
        num_whole = round_up(num_left, limits.page_size)
        if self.remaining_chunk is None and not is_partial:
            if self._has_admitted and num_whole >= self.remaining_input:
                return _nothing(_other("remaining_input", num_whole, self.remaining_input))
            return Chunk(num_tokens=num_left, is_cut=False, verdict=FITS)
        named = {
            "remaining_chunk": math.inf if self.remaining_chunk is None else self.remaining_chunk,
            "remaining_input": self.remaining_input,
            "max_request_tokens": limits.max_request_tokens or math.inf,
            "remaining_total": most,
        }
        name = min(named, key=named.__getitem__)
        if num_whole <= named[name]:
            return Chunk(num_tokens=num_left, is_cut=False, verdict=FITS)
        end = (num_before + math.floor(named[name])) // limits.page_size * limits.page_size
        num_tokens = end - num_before
        if num_tokens <= 0:
            short = _no_token if name == "remaining_total" else _other
            return _nothing(short(name, num_whole, named[name]))
        if num_tokens >= num_left:
            return Chunk(num_tokens=num_left, is_cut=False, verdict=FITS)
        if not is_partial and self._num_partial >= limits.max_partial:
            return _nothing(_other("max_partial", 1, 0))
        return Chunk(num_tokens=num_tokens, is_cut=True, verdict=FITS)

    def _reserve(self, num_tokens: int, num_output: int) -> None:
        num_computed = round_up(num_tokens, self._limits.page_size)
        num_immediate = num_computed + self._limits.page_size
        self._total_offset += num_immediate + num_output
        self._current_offset += num_immediate
        self._has_reserved = True
        self.remaining_input -= num_computed
        if self.remaining_chunk is not None:
            self.remaining_chunk -= num_computed

    def _output_estimate(self, request: Request) -> int:
        return min(max(request.max_new_tokens - request.num_generated, 0), self._limits.max_output_estimate)


def fits_until_all_end(running: Iterable[Running], *, num_available: int) -> bool:
    """Return whether requests can generate all their `max_new_tokens` without a preemption.

    The request with the fewest tokens left ends first and frees its memory; until then each request takes a token per
    step. It fits if the memory lasts from each end to the next. Shared tokens are counted as freed and pages are not
    counted: keep a page for each request in reserve.

    Args:
        running: All running requests, and the one to be admitted.
        num_available: Tokens of KV memory available now.

    Source: SGLang's check for requests that ignore the end of sequence.
    """
    left = sorted((max(0, r.max_new_tokens - r.num_generated), r.num_tokens) for r in running)
    num_steps = 0
    for place, (num_left, num_tokens) in enumerate(left):
        num_available -= (num_left - num_steps) * (len(left) - place)
        if num_available < 0:
            return False
        num_available += num_tokens + num_left
        num_steps = num_left
    return True


def _no_token(name: str, wanted: float, left: float) -> Verdict:
    return Verdict(outcome=Outcome.NO_TOKEN, short_of=name, wanted=wanted, left=left)


def _other(name: str, wanted: float, left: float) -> Verdict:
    return Verdict(outcome=Outcome.OTHER, short_of=name, wanted=wanted, left=left)


def _nothing(verdict: Verdict) -> Chunk:
    return Chunk(num_tokens=0, is_cut=False, verdict=verdict)
