"""Limits on the tokens and requests of one step."""

from dataclasses import dataclass, replace

from pagewood.schedpolicy.counts import require_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The limits of every step.

    A step takes decodes first, and prompts in chunks from the rest, so long prompts do not stall running requests.
    Invariant: `max_step_tokens >= max_running`, so that every running request can decode in every step.

    Source: stall-free batching of Sarathi-Serve (arXiv 2403.02310).

    Attributes:
        max_step_tokens: Tokens of one forward pass, decode and prefill together.
        max_chunk_tokens: Prompt tokens of one request in one step, so that a long prompt leaves room for others; None
            for no limit but the step's.
        max_running: Requests that run at once.
        max_prefills: Requests whose prompts are computed in one step.
        prefill_first: Whether a step that computes prompts computes nothing else. The caller plans prompts and
            admissions first; `take_decode` declines once prompt tokens are taken. The time to the first token is
            shortest, and running requests get no tokens in such steps.
        max_prefill_tokens: Prompt tokens of one step, over all requests; None for no limit but the step's.
        joint_prefill_tokens: Prompt tokens that keep the device busy, >= 1. A step gets no further prompt when the
            prompts that end in it have at least this many tokens together: another one would end no sooner than in the
            next step, and it would delay the others. None: there is no such limit.
    """

    max_step_tokens: int
    max_chunk_tokens: int | None
    max_running: int
    max_prefills: int
    prefill_first: bool = False
    max_prefill_tokens: int | None = None
    joint_prefill_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "max_step_tokens", "max_chunk_tokens", "max_running", "max_prefills", "max_prefill_tokens",
            "joint_prefill_tokens",
        ):  # fmt: skip
            value: int | None = getattr(self, name)
            if value is not None or name in ("max_step_tokens", "max_running", "max_prefills"):
                require_count(name, value, least=1)
        if self.max_step_tokens < self.max_running:
            raise ValueError(f"max_step_tokens must be >= max_running ({self.max_running}), got {self.max_step_tokens}")

    def open(self, num_running: int, *, num_decodes: int = 0, max_prefill_tokens: int | None = None) -> "StepBudget":
        """Return the budget of one step that starts with `num_running` requests running.

        Args:
            num_running: Running requests.
            num_decodes: Number of these for which a token is kept, whether decodes are taken before prompts or after;
                0 is enough if decodes are taken first.
            max_prefill_tokens: Limit on prompt tokens of this step, >= 0, if it depends on the step (`DynamicChunk`).
                It can only lower the limit of the budget; None leaves that limit as it is.

        Raises:
            ValueError: An argument is out of range.
        """
        if not 0 <= require_count("num_running", num_running) <= self.max_running:
            raise ValueError(f"num_running must be in [0, {self.max_running}], got {num_running}")
        if not 0 <= require_count("num_decodes", num_decodes) <= num_running:
            raise ValueError(f"num_decodes must be in [0, num_running ({num_running})], got {num_decodes}")
        if max_prefill_tokens is not None:
            require_count("max_prefill_tokens", max_prefill_tokens, least=0)
        num_prefill_left = self.max_step_tokens
        for limit in (self.max_prefill_tokens, max_prefill_tokens):
            if limit is not None and limit < num_prefill_left:
                num_prefill_left = limit
        return StepBudget(
            budget=self,
            num_running=num_running,
            num_left=self.max_step_tokens,
            num_kept=0 if self.prefill_first else num_decodes,
            num_prefill_left=num_prefill_left,
        )


def decode_first(*, max_running: int, max_prefill_tokens: int, max_prefills: int = 8) -> Budget:
    """Return a budget that never stalls running requests: each of them decodes in every step.

    Args:
        max_running: Requests that run at once.
        max_prefill_tokens: Prompt tokens of one step, over all requests, >= 1.
        max_prefills: Requests that share them.
    """
    require_count("max_prefill_tokens", max_prefill_tokens, least=1)
    return Budget(
        max_step_tokens=max_prefill_tokens + max_running,
        max_chunk_tokens=max_prefill_tokens,
        max_running=max_running,
        max_prefills=max_prefills,
        max_prefill_tokens=max_prefill_tokens,
    )


def stall_free(*, max_running: int, max_step_tokens: int, max_prefills: int = 8) -> Budget:
    """Return the budget of Sarathi-Serve: each running request decodes in every step, and prompts fill up the rest.

    So the time between two tokens hardly depends on how many requests run. Prompts get an eighth of the tokens in any
    case, beyond `max_step_tokens` if need be, so that they make progress beside many decodes.

    Args:
        max_running: Requests that run at once.
        max_step_tokens: Tokens of one step, decodes and prompts together, >= 1.
        max_prefills: Requests that share those of the prompts.

    Source: Sarathi-Serve (arXiv 2403.02310).
    """
    require_count("max_step_tokens", max_step_tokens, least=1)
    return Budget(
        max_step_tokens=max(max_step_tokens, max_running + max(1, max_step_tokens // 8)),
        max_chunk_tokens=max_step_tokens,
        max_running=max_running,
        max_prefills=max_prefills,
        max_prefill_tokens=max_step_tokens,
    )


MIXINGS = ("decode-first", "stall-free", "prefill-first")
"""Names of `budget_named`: how prompts and decodes share steps."""


def budget_named(
    name: str,
    *,
    max_running: int,
    max_prefill_tokens: int,
    max_prefills: int = 8,
    joint_prefill_tokens: int | None = None,
) -> Budget:
    """Return one of the ways in which prompts and decodes can share steps, for the same limits.

    Args:
        name: decode-first: prompts get up to `max_prefill_tokens` beside the decodes; stall-free: together with the
            decodes; prefill-first: in steps without decodes, which come first.
        max_running: Requests that run at once.
        max_prefill_tokens: Prompt tokens of one step, over all requests, >= 1.
        max_prefills: Requests that share them.
        joint_prefill_tokens: As in `Budget`.

    Raises:
        ValueError: The name is unknown, or a limit is out of range.
    """
    if name not in MIXINGS:
        raise ValueError(f"name must be one of {', '.join(MIXINGS)}, got {name!r}")
    if name == "stall-free":
        budget = stall_free(max_running=max_running, max_step_tokens=max_prefill_tokens, max_prefills=max_prefills)
    else:
        budget = decode_first(max_running=max_running, max_prefill_tokens=max_prefill_tokens, max_prefills=max_prefills)
    return replace(budget, prefill_first=name == "prefill-first", joint_prefill_tokens=joint_prefill_tokens)


def prefill_first(*, max_running: int, max_prefill_tokens: int = 16_384) -> Budget:
    """Return SGLang's default budget: prompts are computed before decodes, in steps of their own, whole if they fit.

    Args:
        max_running: Requests that run at once.
        max_prefill_tokens: Prompt tokens of one step, >= max_running.
    """
    return Budget(
        max_step_tokens=max_prefill_tokens,
        max_chunk_tokens=None,
        max_running=max_running,
        max_prefills=max_running,
        prefill_first=True,
    )


@dataclass(slots=True, kw_only=True)
class StepBudget:
    """The remaining budget of one step; made by `Budget.open`.

    Invariant: the tokens taken never exceed the budget, and prompts never take tokens that are kept for decodes. If the
    caller takes decodes first, or opens the step with `num_decodes`, every decode gets its token, whatever the prompts
    want.

    Attributes:
        budget: The limits; a planner reads `budget.prefill_first` to plan prompts before decodes.
        num_running: Running requests, including those admitted in this step.
        num_left: Tokens that can still be taken.
        num_kept: Number of these that only decodes may take.
        num_prefill_left: Prompt tokens that may still be taken, as far as tokens are left.
        num_prefills: Requests that have taken prompt tokens.
        num_ended: Prompt tokens taken by requests whose prompts end in this step.
    """

    budget: Budget
    num_running: int  # written by: admit
    num_left: int  # written by: take_decode, take_decodes, take_prefill
    num_kept: int  # written by: take_decode, take_decodes
    num_prefill_left: int  # written by: take_prefill
    num_prefills: int = 0  # written by: take_prefill
    num_ended: int = 0  # written by: take_prefill

    def take_decode(self, n: int = 1) -> bool:
        """Take the `n` tokens of one decoding request, or none of them; `n` is more than 1 if it speculates.

        Raises:
            ValueError: `n` is less than 1.
        """
        if type(n) is not int or n < 1:
            n = require_count("n", n, least=1)
        if n > self.num_left or (self.budget.prefill_first and self.num_prefills):
            return False
        self.num_left -= n
        self.num_kept = max(0, self.num_kept - 1)
        return True

    def take_decodes(self, num_requests: int) -> int:
        """Take one token for each of `num_requests` decoding requests, or for as many as there is room for.

        Returns:
            The number of requests that got one, the same as of calls of `take_decode()` that return True.

        Raises:
            ValueError: `num_requests` is negative.
        """
        if type(num_requests) is not int or num_requests < 0:
            num_requests = require_count("num_requests", num_requests, least=0)
        if self.budget.prefill_first and self.num_prefills:
            return 0
        num_taken = min(num_requests, self.num_left)
        self.num_left -= num_taken
        self.num_kept = max(0, self.num_kept - num_taken)
        return num_taken

    def offer_prefill(self, wanted: int) -> int:
        """Return how many of the `wanted` prompt tokens one request may take now; takes nothing.

        Args:
            wanted: Prompt tokens that are still to be computed; 0 if the whole prompt is cached. (A request that needs
                logits computes at least its last token, so it wants 1.)

        Returns:
            At most `wanted`; 0 when no tokens or no prefills are left.

        Raises:
            ValueError: `wanted` is negative.
        """
        if type(wanted) is not int or wanted < 0:
            wanted = require_count("wanted", wanted, least=0)
        if not self._takes_prompts:
            return 0
        chunk = wanted if self.budget.max_chunk_tokens is None else min(wanted, self.budget.max_chunk_tokens)
        return max(0, min(chunk, self.num_left - self.num_kept, self.num_prefill_left))

    def take_prefill(self, wanted: int, *, ends: bool = True) -> int:
        """Take and return what `offer_prefill` offers; call it once per request and step.

        A request that wants 0 tokens takes nothing, and does not count as a prefill. `ends` says whether the prompt
        ends with these tokens.

        Raises:
            ValueError: `wanted` is negative.
        """
        num_taken = self.offer_prefill(wanted)
        if num_taken:
            self.num_left -= num_taken
            self.num_prefill_left -= num_taken
            self.num_prefills += 1
            self.num_ended += num_taken if ends else 0
        return num_taken

    @property
    def can_admit(self) -> bool:
        """Whether one more request can be admitted: a place, a prefill and a token are left."""
        return (
            self.num_running < self.budget.max_running
            and self._takes_prompts
            and self.num_left > self.num_kept
            and self.num_prefill_left > 0
        )

    @property
    def _takes_prompts(self) -> bool:
        """Whether another request may take prompt tokens, if there are any."""
        joint = self.budget.joint_prefill_tokens
        return self.num_prefills < self.budget.max_prefills and (joint is None or self.num_ended < joint)

    def admit(self) -> None:
        """Count one more running request; its prompt tokens are taken with `take_prefill`, before or after.

        Raises:
            RuntimeError: `max_running` requests are running already.
        """
        if self.num_running == self.budget.max_running:
            raise RuntimeError(f"num_running must stay <= max_running ({self.budget.max_running})")
        self.num_running += 1
