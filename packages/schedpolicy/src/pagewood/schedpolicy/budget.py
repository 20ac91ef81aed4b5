"""How many tokens and requests one step may take."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The limits of every step.

    Taking decodes first and prompts from what is left, in chunks, keeps long prompts from stalling the requests that
    are being answered. `max_step_tokens >= max_running` holds, so that every running request can decode in every step.

    Source: stall-free batching of Sarathi-Serve (arXiv 2403.02310).

    Attributes:
        max_step_tokens: Tokens of one forward pass, decode and prefill together.
        max_chunk_tokens: Prompt tokens of one request in one step, so that a long prompt leaves room for others; None
            for no limit but the step's.
        max_running: Requests that run at once.
        max_prefills: Requests whose prompts are computed in one step.
    """

    max_step_tokens: int
    max_chunk_tokens: int | None
    max_running: int
    max_prefills: int

    def __post_init__(self) -> None:
        for name in ("max_step_tokens", "max_chunk_tokens", "max_running", "max_prefills"):
            value: int | None = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        if self.max_step_tokens < self.max_running:
            raise ValueError(f"max_step_tokens must be >= max_running ({self.max_running}), got {self.max_step_tokens}")

    def open(self, num_running: int) -> "StepBudget":
        """Return the budget of one step that starts with `num_running` requests running.

        Raises:
            ValueError: `num_running` is not in [0, max_running].
        """
        if not 0 <= num_running <= self.max_running:
            raise ValueError(f"num_running must be in [0, {self.max_running}], got {num_running}")
        return StepBudget(budget=self, num_running=num_running, num_left=self.max_step_tokens)


@dataclass(slots=True, kw_only=True)
class StepBudget:
    """What is left of one step; made by `Budget.open`.

    Invariant: what was taken never exceeds the budget. Take decodes first: then each of the running requests is granted
    its token, whatever the prompts want.

    Attributes:
        budget: The limits.
        num_running: Requests running, those admitted in this step included.
        num_left: Tokens that can still be taken.
        num_prefills: Requests that have taken prompt tokens.
    """

    budget: Budget
    num_running: int  # written by: admit
    num_left: int  # written by: take_decode, take_prefill
    num_prefills: int = 0  # written by: take_prefill

    def take_decode(self, n: int = 1) -> bool:
        """Take the `n` tokens of one decoding request, or none of them: more than one where it speculates.

        Raises:
            ValueError: `n` is less than 1.
        """
        if n < 1:
            raise ValueError(f"n must be >= 1, got {n}")
        if n > self.num_left:
            return False
        self.num_left -= n
        return True

    def offer_prefill(self, wanted: int) -> int:
        """Return how many prompt tokens one request may take now, of those it has still to compute; takes nothing.

        Returns:
            At most `wanted`; 0 when no tokens or no prefills are left.

        Raises:
            ValueError: `wanted` is less than 1.
        """
        if wanted < 1:
            raise ValueError(f"wanted must be >= 1, got {wanted}")
        if self.num_prefills == self.budget.max_prefills:
            return 0
        chunk = wanted if self.budget.max_chunk_tokens is None else min(wanted, self.budget.max_chunk_tokens)
        return min(chunk, self.num_left)

    def take_prefill(self, wanted: int) -> int:
        """Take what `offer_prefill` offers one request, and return it; call it once per request and step.

        Raises:
            ValueError: `wanted` is less than 1.
        """
        num_taken = self.offer_prefill(wanted)
        if num_taken:
            self.num_left -= num_taken
            self.num_prefills += 1
        return num_taken

    @property
    def can_admit(self) -> bool:
        """Whether one more request can start: a place, a prefill and a token are left."""
        return (
            self.num_running < self.budget.max_running
            and self.num_prefills < self.budget.max_prefills
            and self.num_left > 0
        )

    def admit(self) -> None:
        """Count one more running request; its prompt tokens are taken with `take_prefill`, before or after.

        Raises:
            RuntimeError: `max_running` requests are running already.
        """
        if self.num_running == self.budget.max_running:
            raise RuntimeError(f"num_running must stay <= max_running ({self.budget.max_running})")
        self.num_running += 1
