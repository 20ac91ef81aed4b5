"""The draft lengths of a decision, kept for the steps that follow it."""

from collections.abc import Sequence

from pagewood.schedpolicy.drafting.shape import Reason


class KeptLengths:
    """For how many steps the lengths of a decision are kept, and which steps are similar enough for them.

    Where a step takes less than a few milliseconds, a decision for each is too much work for the host. Lengths are kept
    for twice as many steps as the last ones and one more, if their mean differs by less than a third from that of the
    last, otherwise for a quarter as many.
    """

    __slots__ = (
        "_loss_s",
        "_mean",
        "_most_loss_s",
        "_num_plain",
        "_num_requests",
        "is_held",
        "num_left",
        "num_steps",
        "reason",
        "usual",
    )

    def __init__(self) -> None:
        """Start without lengths."""
        self._loss_s = 0.0  # written by: KeptLengths
        self._most_loss_s = 0.0  # written by: KeptLengths
        self._num_plain = 0  # written by: KeptLengths
        self._mean = 0.0  # written by: KeptLengths
        self._num_requests = 0  # written by: KeptLengths
        self.is_held = False
        """Whether there are any."""  # written by: KeptLengths
        self.num_left = 0
        """Steps that are to take them."""  # written by: KeptLengths
        self.num_steps = 0
        """Steps for which the latest are kept in all."""  # written by: KeptLengths
        self.reason: Reason = "gain"
        """Why they are what they are."""  # written by: KeptLengths
        self.usual = 0
        """Their median, which a request gets that is new since the decision."""  # written by: KeptLengths

    def keep(
        self,
        lengths: Sequence[int],
        total: int,
        *,
        num_plain: int,
        plain_s: float,
        loss_s: float,
        reason: Reason = "gain",
        least: int = 0,
        most: int,
    ) -> None:
        """Keep the lengths of a decision.

        Args:
            lengths: Of each request, at least one.
            total: Positions that they add to the step.
            num_plain: Tokens of the step without them.
            plain_s: Its seconds.
            loss_s: Seconds that they cost if nothing is accepted.
            reason: Why they are what they are.
            least: Further steps for which they are kept at least.
            most: Further steps for which they are kept at most.
        """
        mean = total / len(lengths)
        is_like_last = 3 * self._mean <= 4 * mean and 3 * mean <= 4 * self._mean
        num_steps = 2 * self.num_steps + 1 if is_like_last else self.num_steps // 4
        self.num_steps = self.num_left = min(most, max(least, num_steps))
        self._mean, self._num_plain, self._num_requests = mean, num_plain, len(lengths)
        self._loss_s, self._most_loss_s = loss_s, 2 * max(loss_s, plain_s / 4)
        self.is_held, self.reason = True, reason
        self.usual = sorted(lengths)[len(lengths) // 2]

    def are_of(self, num_requests: int, num_plain: int, most_loss_s: float) -> bool:
        """Return whether a step takes them without any further question, because it is like that of the decision.

        Args:
            num_requests: That decode in the step.
            num_plain: Its tokens without drafts.
            most_loss_s: Seconds that may be lost.
        """
        is_alike = num_plain == self._num_plain and num_requests == self._num_requests
        return is_alike and self.num_left > 0 and self._loss_s <= most_loss_s

    def fit(self, num_requests: int, loss_s: float) -> bool:
        """Return whether a step may take them: about as many requests, and at most twice the loss or half of a step.

        Args:
            num_requests: That decode in the step.
            loss_s: Seconds that they would cost there if nothing is accepted.
        """
        last = self._num_requests
        return 3 * last <= 4 * num_requests and 3 * num_requests <= 4 * last and loss_s <= self._most_loss_s

    def total_of(self, num_requests: int) -> int:
        """Return about how many positions they add to a step with this number of requests."""
        return round(self._mean * num_requests)

    def take(self) -> None:
        """Count a step that takes them."""
        self.num_left = max(0, self.num_left - 1)

    def drop(self) -> None:
        """Let no further step take them."""
        self.num_left, self.is_held = 0, False
