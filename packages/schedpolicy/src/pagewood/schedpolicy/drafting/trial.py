"""Drafting against rest: periods of both are measured as a whole, and the faster kind gets more of the time."""

from math import log, log2

from pagewood.schedpolicy.drafting.decode_pace import DecodePace

_SHORT_S = 5e-3
_SHORT_PER_REQUEST_S = 3e-4
"""Steps that take longer than both are not compared: what no estimate has is a small part of them."""
_BLOCK_S = 0.12
_MIN_STEPS, _MAX_STEPS = 64, 512
_ODDS = 4.0
_MOST_ERRORS = 3.0
_MOST_BLOCKS, _FEW_BLOCKS = 64.0, 8.0
_BLOCKS_PER_REQUEST = 4.0
_DECAY = 0.97
_PRIOR_WEIGHT = 6.0
_PRIOR_ERROR = 0.1
_PRIOR_LOSS = 0.04
_MOST_DIFFERENCE = 0.25
_LOSS_PER_GAIN = 10.0
_NO_GAIN = 0.01
_ERRORS_PER_NO_GAIN, _MOST_ERRORS_OF_NO_GAIN = 0.5, 2.0
_SIMILAR = 1.6
_NUM_LASTING = 16


class HiddenLoss:
    """What the estimates of drafting leave out: a decayed mean of comparisons, and its standard error.

    Gains are logarithms of ratios of speeds. Where a gain of g is estimated, g - L (1 + 10 g) is expected: a part of
    the loss L is there without any drafts too, and one grows with what the drafts are thought to gain. On a machine
    with other work the error of one comparison is large, so it says little alone. L starts at 4%, as if that had been
    seen six times with an error of a tenth.
    """

    __slots__ = ("_mean", "_squares", "_weight", "is_measured")

    def __init__(self) -> None:
        """Start without comparisons."""
        self._mean = -_PRIOR_LOSS  # written by: HiddenLoss
        self._weight = _PRIOR_WEIGHT  # written by: HiddenLoss
        self._squares = _PRIOR_WEIGHT * _PRIOR_ERROR**2  # written by: HiddenLoss
        self.is_measured = False
        """Whether there has been a comparison."""  # written by: HiddenLoss

    def significance(self, estimate: float) -> float:
        """Return an estimated gain less the loss, in units of its standard error."""
        return (estimate / (1 + _LOSS_PER_GAIN * estimate) + self._mean) * self._weight / self._squares**0.5

    def observe(self, gain: float, estimate: float) -> None:
        """Learn from a measured and an estimated gain; of a larger difference than a quarter, a quarter counts."""
        value = min(_MOST_DIFFERENCE, max(-_MOST_DIFFERENCE, gain - estimate)) / (1 + _LOSS_PER_GAIN * estimate)
        self.is_measured = True
        self._weight = _DECAY * self._weight + 1
        surprise = value - self._mean
        self._mean += surprise / self._weight
        self._squares = _DECAY * self._squares + surprise * (value - self._mean)


class _Block:
    """Steps of one kind, added up."""

    __slots__ = ("elapsed_s", "estimates", "num_requests", "num_steps", "num_tokens")

    def __init__(self) -> None:
        """Start without steps."""
        self.num_steps = 0  # written by: Trial
        self.num_requests = 0.0
        """Of all steps, added up."""  # written by: Trial
        self.num_tokens = 0
        """Tokens that they have yielded."""  # written by: Trial
        self.elapsed_s = 0.0  # written by: Trial
        self.estimates = 0.0
        """Estimated gains of drafting, of all steps, added up."""  # written by: Trial

    def speed(self, pace: DecodePace) -> float:
        """Return how fast they were, relative to the pace at their mean load; 0: it is not known."""
        token_s = pace.token_s(self.num_requests / self.num_steps)
        return 0.0 if token_s is None else self.num_tokens * token_s / self.elapsed_s


class _Periods:
    """The periods of one load: which kind the present one is, and what has been measured."""

    __slots__ = ("block", "estimate", "is_resting", "last", "loss", "num_blocks", "num_vain")

    def __init__(self) -> None:
        """Start with a period of drafting."""
        self.loss = HiddenLoss()
        """What the estimates leave out."""
        self.is_resting = False
        """Whether nothing is drafted in the present period."""  # written by: Trial
        self.num_blocks = 0
        """Blocks of the present period that have ended."""  # written by: Trial
        self.block = _Block()
        """The present block."""  # written by: Trial
        self.last: _Block | None = None
        """The block before, if it was of the other kind."""  # written by: Trial
        self.estimate = 0.0
        """Estimated gain of the last block of drafting."""  # written by: Trial
        self.num_vain = 0
        """Blocks of drafting in succession with an estimate below 1%."""  # written by: Trial


class Trial:
    """Says in which periods drafts may be made at all, by what whole periods with and without them yield.

    The estimates of single steps leave out what they do not know of: the host's work for decisions, drafters that
    follow the text before a probe, prompts that make steps unequal. Where steps are short, that can be more than drafts
    gain. So their time is cut into blocks of about 0.12 s, each of drafting or of rest. The speeds of two neighbours
    that differ are compared, and that comparison with the estimate. The first two are one of each kind. If neither then
    seems faster, both get half of the time. Each standard error by which one seems faster gives it four times as many
    blocks, up to 64 for one of the other. Where not even the estimate says that drafting gains 1%, rest gets at least
    two, four, eight and then sixteen blocks. But n requests rest for 4 n blocks at most (8 if they are one or two): the
    fewer they are, the faster their text changes, and the more drafts can gain.

    Each load has periods of its own, shared with loads that differ by less than about a half; a change of the load
    counts after 16 steps. Invariant: where steps take 5 ms or more, and 0.3 ms for each request, nothing rests; without
    measured durations neither.
    """

    __slots__ = ("_least_load", "_most_load", "_num_other", "_pace", "_periods", "_periods_by_load", "speedup")

    def __init__(self, pace: DecodePace) -> None:
        """Start with a period of drafting.

        Args:
            pace: Says what tokens take without drafts at each load, so that blocks with different ones are comparable.
        """
        self._pace = pace
        self.speedup = 1.0
        """Expected tokens per second of the latest decision, relative to plain decoding."""
        # written by: drafting.decisions
        self._periods = _Periods()  # written by: Trial
        self._periods_by_load: dict[int, _Periods] = {}  # contents written by: Trial
        self._least_load = 1.0
        """The fewest requests for which the present periods are; `_most_load`: the most."""  # written by: Trial
        self._most_load = 0.0  # written by: Trial
        self._num_other = _NUM_LASTING
        """Steps in succession with fewer or more requests."""  # written by: Trial

    @property
    def is_resting(self) -> bool:
        """Whether nothing is drafted in the present period."""
        return self._periods.is_resting

    def note_load(self, load: float, num_steps: int = 1) -> bool:
        """Note the requests of some steps, >= 1, and return whether a period of the other kind begins."""
        if self._least_load <= load <= self._most_load:
            self._num_other = 0
            return False
        self._num_other += num_steps
        if self._num_other < _NUM_LASTING:
            return False
        was_resting = self._periods.is_resting
        self._num_other, self._least_load, self._most_load = 0, load / _SIMILAR, load * _SIMILAR
        self._periods = self._periods_by_load.setdefault(round(log2(load)), _Periods())
        return self._periods.is_resting != was_resting

    def observe(self, load: float, num_steps: int, num_tokens: int, elapsed_s: float) -> bool:
        """Learn from steps that ended, and return whether a period of the other kind begins.

        Args:
            load: Requests of each step, on average.
            num_steps: How many steps.
            num_tokens: Tokens that they yielded.
            elapsed_s: Their seconds, with all that the host does; 0: not measured.
        """
        if elapsed_s <= 0 or load < 1:
            return False
        is_changed = self.note_load(load, num_steps)
        periods, token_s = self._periods, self._pace.token_s(load)
        if (elapsed_s / num_steps if token_s is None else load * token_s) >= max(_SHORT_S, load * _SHORT_PER_REQUEST_S):
            return self._begin(periods, is_resting=False) != is_changed
        block = periods.block
        block.num_steps += num_steps
        block.num_requests += num_steps * load
        block.num_tokens += num_tokens
        block.elapsed_s += elapsed_s
        block.estimates += num_steps * log(self.speedup)
        if block.num_steps >= _MAX_STEPS or (block.num_steps >= _MIN_STEPS and block.elapsed_s >= _BLOCK_S):
            return self._end_block(periods, block) != is_changed
        return is_changed

    def _end_block(self, periods: _Periods, block: _Block) -> bool:
        """Compare a block with the one before it, and return whether a period of the other kind begins."""
        is_resting, last = periods.is_resting, periods.last
        if not is_resting:
            periods.estimate = block.estimates / block.num_steps
            periods.num_vain = periods.num_vain + 1 if periods.estimate < _NO_GAIN else 0
        if last is not None:
            speed, last_speed = block.speed(self._pace), last.speed(self._pace)
            if speed and last_speed:
                gain = log(speed / last_speed)
                periods.loss.observe(-gain if is_resting else gain, periods.estimate)
        periods.block, periods.last, periods.num_blocks = _Block(), None, periods.num_blocks + 1
        significance = periods.loss.significance(periods.estimate) if periods.loss.is_measured else 0.0
        if periods.num_vain:
            significance = min(significance, -min(_MOST_ERRORS_OF_NO_GAIN, _ERRORS_PER_NO_GAIN * periods.num_vain))
        num_errors, most = significance, _MOST_BLOCKS
        if is_resting:
            few = _BLOCKS_PER_REQUEST * block.num_requests / block.num_steps
            num_errors, most = -significance, min(most, max(_FEW_BLOCKS, few))
        if periods.num_blocks < min(most, _ODDS ** min(_MOST_ERRORS, num_errors)):
            return False
        periods.last = block
        return self._begin(periods, is_resting=not is_resting)

    def _begin(self, periods: _Periods, *, is_resting: bool) -> bool:
        """Let the present period be of a kind, and return whether it was of the other."""
        if periods.is_resting == is_resting:
            return False
        periods.is_resting, periods.num_blocks = is_resting, 0
        return True
