"""Plain steps that measure what plain decoding costs: when one is taken, and which measured ones count."""

from pagewood.schedpolicy.drafting.host_time import SHORT_S
from pagewood.schedpolicy.drafting.step_cost import StepCost

_FIRST_INTERVAL = 16
_MIN_INTERVAL = 4
_MAX_INTERVAL = 256
_MAX_SHARE = 1 / 64
_NUM_SHORT = 3
_NEAR = 0.1


class PlainSamples:
    """Says which steps are taken without drafts to be measured, and learns how often that is needed.

    A step of a new size is first taken plain. While drafts are made, one plain step is taken after 16 steps, then up to
    every 256, more often where it differs from the table. If it is short, three are taken, of which the second counts,
    because the work of the host for the steps around it is part of its time. Invariant: while drafts are made, samples
    cost at most about a sixty-fourth of what the drafts gain.
    """

    __slots__ = ("_interval", "_num_drafting", "_num_left", "_num_plain", "_size", "speedup")

    def __init__(self) -> None:
        """Start without observations."""
        self.speedup = 1.0
        """Expected tokens per second of the latest lengths, relative to plain decoding."""
        # written by: drafting.decisions
        self._interval = _FIRST_INTERVAL
        """Steps with drafts until a sample."""  # written by: PlainSamples
        self._num_drafting = 0
        """Steps with drafts since the last plain one."""  # written by: PlainSamples
        self._num_left = 0
        """Plain steps that complete a sample."""  # written by: PlainSamples
        self._size = 0
        """Tokens of the latest step that was plain because its size was new."""  # written by: PlainSamples
        self._num_plain = 0
        """Plain steps that were observed since the last one with drafts."""  # written by: PlainSamples

    def takes(self, cost: StepCost, num_plain: int, plain_s: float) -> bool:
        """Return whether a step is taken without drafts to measure it.

        Args:
            cost: Cost of steps.
            num_plain: Tokens of the step without drafts.
            plain_s: Its seconds.
        """
        if self._num_left:
            self._num_left -= 1
            return True
        num_samples = _NUM_SHORT if plain_s < SHORT_S else 1
        is_due = self._num_drafting >= self._interval
        if is_due:
            # Where drafts gain much, a plain step costs much, and no error of its price would change the decision.
            is_due = self._num_drafting >= int(num_samples * max(0.0, self.speedup - 1) / _MAX_SHARE)
        if not is_due:
            if num_plain == self._size or cost.is_observed(num_plain):
                return False
            self._size = num_plain  # once, in case it is not measured
        self._num_drafting = 0
        self._num_left = num_samples - 1
        return True

    def draft(self) -> None:
        """Count a step with drafts."""
        self._num_drafting += 1

    def decline(self) -> None:
        """Count a step for which no drafts are the decision: it is plain already."""
        self._num_drafting = 0

    def observe_drafts(self) -> None:
        """Note that a step with drafts has ended."""
        self._num_plain = 0

    def observe_plain(self) -> bool:
        """Note that a plain step has ended, and return whether the step before it was plain too."""
        self._num_plain += 1
        return self._num_plain > 1

    def is_typical(self, cost: StepCost, num_tokens: int, num_steps: int) -> bool:
        """Return whether the duration of the latest plain step is that of plain decoding.

        The host prepares one step and retires another while a step is computed. So the time of a short plain step
        counts only if the steps around it are plain too.

        Args:
            cost: Cost of steps.
            num_tokens: Tokens of the step.
            num_steps: Plain steps that it stands for.
        """
        return num_steps > 1 or self._num_plain == 2 or cost.seconds(num_tokens) >= SHORT_S

    def compare(self, ratio: float) -> None:
        """Learn how often to measure from a typical step that took `ratio` times as long as expected."""
        interval = self._interval * 2 if abs(ratio - 1) < _NEAR else self._interval // 2
        self._interval = min(_MAX_INTERVAL, max(_MIN_INTERVAL, interval))
