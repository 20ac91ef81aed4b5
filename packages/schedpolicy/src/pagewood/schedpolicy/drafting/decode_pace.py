"""What a token of plain decoding takes, by load, with everything that happens between steps."""

_NUM_STEPS = 1024
_NUM_KNOWN = 48
_SURPRISE = 1.5


class DecodePace:
    """Seconds per token of steps without drafts, for each number of requests.

    A table of steps by size (`StepCost`) says what more tokens in a step cost. It does not say what drafts save: where
    steps take less than the host's work for a request that ends and the one that follows it, such a step takes as long
    with one token more. The pace is that of all steps in which requests decode, in the same proportion for both kinds.

    The time of a step is nearly a part of its own and one for each request. So the pace at the mean load of some steps
    is that of all of them together, even if their loads differ.

    Old steps count less: the pace is about the mean of the last 1,024. Loads that differ by less than an eighth share
    one. Invariant: of an entry that is known, no observation changes the seconds by more than half.
    """

    __slots__ = ("_seconds", "_steps", "_tokens")

    def __init__(self) -> None:
        """Start without observations."""
        self._steps: dict[int, float] = {}  # written by: DecodePace
        self._tokens: dict[int, float] = {}  # written by: DecodePace
        self._seconds: dict[int, float] = {}  # written by: DecodePace

    def token_s(self, load: float) -> float | None:
        """Return the seconds of a token at this number of requests; None: fewer than about 48 steps were observed."""
        key = _key(load)
        return self._seconds[key] / self._tokens[key] if self._steps.get(key, 0.0) >= _NUM_KNOWN else None

    def observe(self, load: float, num_steps: int, num_tokens: int, seconds: float) -> None:
        """Learn from some steps without drafts.

        Args:
            load: Requests of each on average, with those that have ended meanwhile.
            num_steps: How many steps, >= 1.
            num_tokens: Tokens that they yielded.
            seconds: Of all of them, from the end of the one before.
        """
        key, known_s = _key(load), self.token_s(load)
        if known_s is not None:
            seconds = min(seconds, _SURPRISE * num_tokens * known_s)
        kept = max(0.0, 1 - num_steps / _NUM_STEPS)
        for sums, value in ((self._steps, num_steps), (self._tokens, num_tokens), (self._seconds, seconds)):
            sums[key] = sums.get(key, 0.0) * kept + value


def _key(load: float) -> int:
    """Return a number that loads share which differ by less than an eighth."""
    num = round(load)
    shift = max(0, num.bit_length() - 3)
    return num >> shift << shift
