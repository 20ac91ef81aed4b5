"""The clock of steps without drafts: which of them rest, and when the next probe is due."""

from pagewood.schedpolicy.drafting.shape import Reason
from pagewood.schedpolicy.drafting.wake_debt import MAX_DELAY, NUM_FOLLOWED

_MIN_INTERVAL = 16
_MAX_INTERVAL = 512
_REST_AFTER = 4
_SIMILAR = 0.75
_ENDLESS = 1 << 62


class RestClock:
    """Counts the steps for which nothing is drafted.

    After four decisions in succession for no drafts most steps rest: they get no drafts without a decision. A probe is
    due after 16 steps, the next one after twice as many, up to 512, or later if it must be paid for first, which is
    found out at the first decision. Drafters need not follow the text until 24 steps before it. A period without drafts
    (`Trial`) rests as a whole. Invariant: a rest ends early where the load is below three quarters of that of the
    latest decision.
    """

    __slots__ = (
        "_least_load",
        "_num_declined",
        "_num_left",
        "_probe_at",
        "is_far",
        "is_priced",
        "num_idle",
        "num_requests",
        "num_withdrawn",
        "reason",
    )

    def __init__(self) -> None:
        """Start as after a step with drafts."""
        self.reason: Reason = "acceptance"
        """Why the latest decision was for no drafts."""  # written by: RestClock
        self.is_far = False
        """Whether the step that is decided begins or continues a rest whose end is far."""
        # written by: RestClock, control
        self.num_idle = 0
        """Steps without drafts since the last one with drafts, but for samples."""  # written by: RestClock
        self.num_withdrawn = 0
        """How many of them were of periods that are over."""  # written by: RestClock
        self.num_requests = 0
        """Requests of the latest decision."""  # written by: RestClock
        self._least_load = 0.0
        """Requests below which a rest ends early."""  # written by: RestClock
        self._num_declined = 0
        """Decisions in succession for no drafts."""  # written by: RestClock
        self._num_left = 0
        """Steps that rest before the next decision."""  # written by: RestClock
        self._probe_at = _MIN_INTERVAL
        """Steps without drafts after which a probe is due."""  # written by: RestClock
        self.is_priced = False
        """Whether that has been put off until the probe is paid for."""  # written by: RestClock

    @property
    def is_probe_due(self) -> bool:
        """Whether a probe should be made now."""
        return self.num_idle >= self._probe_at

    @property
    def is_settled(self) -> bool:
        """Whether enough decisions in succession were for no drafts that most steps rest."""
        return self._num_declined >= _REST_AFTER

    def rests(self, num_requests: int) -> bool:
        """Return whether a step with this number of requests rests, and count it."""
        num_left = self._num_left
        if not num_left or num_requests < self._least_load:
            return False
        self._num_left = num_left - 1
        self.num_idle = num_idle = self.num_idle + 1
        self.is_far = num_idle + NUM_FOLLOWED < self._probe_at
        return True

    def note_load(self, num_requests: int) -> float:
        """Note the requests of a decision, and return by what factor they are fewer, or 1.

        If they are much fewer, the next probe is due as early as after drafts: what one costs now is not known yet.
        """
        factor = 1.0
        if num_requests < self._least_load:
            factor = num_requests / self.num_requests
            self.hasten()
        self.num_requests, self._least_load = num_requests, _SIMILAR * num_requests
        return factor

    def hasten(self) -> None:
        """Let the next probe be due as early as after drafts, because what was measured may have changed.

        It does not end a period without drafts, in which the last results of the one before come back.
        """
        if self._probe_at != _ENDLESS:
            self._probe_at, self.is_priced = _MIN_INTERVAL, False

    def postpone(self, num_idle: int) -> None:
        """Let the next probe not be due before this number of steps without drafts, those before now included."""
        self._probe_at = max(self._probe_at, min(self.num_idle + MAX_DELAY, num_idle))
        self.is_priced = True

    def draft(self) -> None:
        """Count a step with drafts that are expected to gain."""
        self.num_idle = self.num_withdrawn = self._num_declined = self._num_left = 0
        self._probe_at, self.is_priced = _MIN_INTERVAL, False

    def probe(self) -> None:
        """Count a probe."""
        self.num_idle = self.num_withdrawn = self._num_declined = 0
        self._probe_at, self.is_priced = max(_MIN_INTERVAL, min(2 * self._probe_at, _MAX_INTERVAL)), False

    def decline(self, reason: Reason) -> None:
        """Count a decision for no drafts."""
        self.reason = reason
        self.num_idle += 1
        self._num_declined += 1

    def withdraw(self) -> None:
        """Begin or continue a period in which nothing is drafted; `end_period` ends it."""
        self.reason = "trial"
        self.num_idle += 1
        self._num_left = self._probe_at = _ENDLESS
        self.is_far = True

    def end_period(self) -> None:
        """End what was decided in a period; the next probe is due as early as after drafts."""
        self._num_left = self._num_declined = 0
        self.num_withdrawn = self.num_idle
        self._probe_at, self.is_priced = self.num_idle + _MIN_INTERVAL, False

    def rest(self, num_steps: int) -> None:
        """Let the next steps rest, and drafters with them and in this one if the next probe is far."""
        self._num_left = num_steps
        self.is_far = self.num_idle + NUM_FOLLOWED < self._probe_at
