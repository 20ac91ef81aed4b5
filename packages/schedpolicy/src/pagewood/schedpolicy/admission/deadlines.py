"""Estimates whether a deadline can be met, before any work is done for the request."""

from dataclasses import dataclass

from pagewood.schedpolicy.counts import require_count, require_real
from pagewood.schedpolicy.requests import DeadlineWaiting
from pagewood.schedpolicy.steps.latency import StepModel, pairs_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The work of the engine apart from the request.

    Attributes:
        num_prompt_tokens_ahead: Prompt tokens that will be computed before the request's own.
        num_decode: Requests that decode.
        num_kv: Tokens of KV that these requests read in a step.
    """

    num_prompt_tokens_ahead: int = 0
    num_decode: int = 0
    num_kv: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLate:
    """A deadline that is expected to be missed."""

    deadline_s: float
    expected_s: float

    @property
    def reason(self) -> str:
        """The reason, for the client."""
        return f"deadline_s is {self.deadline_s:.3f}, but the request is expected to end at {self.expected_s:.3f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Feasibility:
    """Estimates when a request would end, so that requests that would miss their deadline are refused on arrival.

    With the present load, it finds requests that will probably miss their deadlines; with `Load()`, it finds requests
    that would miss them even on an idle engine, as far as the step model is right.

    Attributes:
        model: Duration of steps.
        chunk_tokens: Prompt tokens of one step, >= 1.
        output_ratio: Part of the allowed output that is expected, in [0, 1].
    """

    model: StepModel
    chunk_tokens: int
    output_ratio: float = 1.0

    def __post_init__(self) -> None:
        require_count("chunk_tokens", self.chunk_tokens, least=1)
        require_real("output_ratio", self.output_ratio)
        if not 0 <= self.output_ratio <= 1:
            raise ValueError(f"output_ratio must be in [0, 1], got {self.output_ratio}")

    def expected_end_s(self, request: DeadlineWaiting, now_s: float, load: Load) -> float:
        """Return when the request would end if it were next: its prompt in chunks, then one step per token."""
        num_own = max(1, request.num_tokens - request.num_matched)
        num_prefill = load.num_prompt_tokens_ahead + num_own
        num_full, num_rest = divmod(num_prefill, self.chunk_tokens)
        step_s = self.model.step_s
        chunk_s = step_s(num_prefill=self.chunk_tokens, num_decode=load.num_decode, num_kv=load.num_kv)
        prompt_s = num_full * chunk_s + self.model.pair_s * pairs_of(request.num_matched, num_own)
        if num_rest:
            prompt_s += step_s(num_prefill=num_rest, num_decode=load.num_decode, num_kv=load.num_kv)
        # The last step of the prompt samples the first token.
        num_output = round(self.output_ratio * (request.max_new_tokens - request.num_generated))
        num_kv = load.num_kv + request.num_tokens
        decode_s = step_s(num_prefill=0, num_decode=load.num_decode + 1, num_kv=num_kv)
        return now_s + prompt_s + max(0, num_output - 1) * decode_s

    def check(self, request: DeadlineWaiting, now_s: float, load: Load) -> TooLate | None:
        """Return the reason to refuse the request, or None if it can meet its deadline."""
        expected_s = self.expected_end_s(request, now_s, load)
        if expected_s <= request.deadline_s:
            return None
        return TooLate(deadline_s=request.deadline_s, expected_s=expected_s)
