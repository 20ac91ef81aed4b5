"""The clock of steps without drafts: which of them rest, and when the next probe is due."""

from pagewood.schedpolicy.drafting.shape import Reason
from pagewood.schedpolicy.drafting.wake_debt import MAX_DELAY

_MIN_INTERVAL = 16
_MAX_INTERVAL = 512
_REST_AFTER = 4
_NUM_FOLLOWED = 24
_SIMILAR = 0.75


class RestClock:
    """Counts the steps for which nothing is drafted.

    After four decisions in succession for no drafts most steps rest: they get no drafts without a decision. A probe is
    due after 16 steps, the next one after twice as many, up to 512, or later if it must be paid for first. Drafters
    need not follow the text until 24 steps before it. Invariant: a rest ends early where the load is below three
    quarters of that of the latest decision.
    """

    __slots__ = (
        "_least_load",
        "_num_declined",
        "_num_left",
        "_probe_at",
        "is_far",
        "num_idle",
        "num_requests",
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
        self.is_far = num_idle + _NUM_FOLLOWED < self._probe_at
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
        """Let the next probe be due as early as after drafts, because what was measured may have changed."""
        self._probe_at = _MIN_INTERVAL

    def postpone(self, num_idle: int) -> None:
        """Let the next probe be due after this number of steps without drafts."""
        self._probe_at = min(MAX_DELAY, num_idle)

    def draft(self) -> None:
        """Count a step with drafts that are expected to gain."""
        self.num_idle = self._num_declined = self._num_left = 0
        self._probe_at = _MIN_INTERVAL

    def probe(self) -> None:
        """Count a probe."""
        self.num_idle = self._num_declined = 0
        self._probe_at = max(_MIN_INTERVAL, min(2 * self._probe_at, _MAX_INTERVAL))

    def decline(self, reason: Reason) -> None:
        """Count a decision for no drafts."""
        self.reason = reason
        self.num_idle += 1
        self._num_declined += 1

    def pause(self, num_steps: int) -> None:
        """Let the next steps have no drafts, because there is no time for a decision or a decision cannot help."""
        self._num_left = num_steps

    def rest(self, num_steps: int) -> None:
        """Let the next steps rest, and drafters with them if the next probe is far."""
        self._num_left = num_steps
        self.is_far = self.num_idle + _NUM_FOLLOWED < self._probe_at
