"""How much a key may use: requests and tokens per minute, and requests at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from pagewood.server.http.errors import ApiError
from pagewood.server.keys.key import ApiKey


class TokenBucket:
    """Fills at a constant rate, up to the units of one minute.

    Invariant: the level is at most the size. It may be negative: some units are taken after the fact.

    Args:
        size: units per minute, and the most that it holds.
        clock: seconds.
    """

    __slots__ = ("_clock", "_level", "_since_s", "size")

    def __init__(self, size: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.size = size
        self._clock = clock
        self._level = float(size)  # written by: take, level
        self._since_s = clock()  # written by: level

    @property
    def level(self) -> float:
        """Units that it holds now."""
        now_s = self._clock()
        self._level = min(self.size, self._level + (now_s - self._since_s) * self.size / 60)
        self._since_s = now_s
        return self._level

    def take(self, number: int) -> None:
        """Take units, even if the level becomes negative."""
        self._level = self.level - number

    def wait_s(self, level: float) -> float:
        """Return the seconds until it holds that many units; 0 if it already does."""
        return max(0.0, (level - self.level) * 60 / self.size)


@dataclass(slots=True, kw_only=True)
class Quota:
    """The use of one key.

    A request is admitted if one request and one token are left. The tokens of a request are counted when it ends,
    because their number is unknown before. So a key can exceed its tokens by those of its simultaneous requests. It
    must then wait until its level has recovered.
    """

    key: ApiKey
    clock: Callable[[], float] = time.monotonic
    requests: TokenBucket | None = field(init=False)
    tokens: TokenBucket | None = field(init=False)
    num_open: int = 0  # written by: admit, end
    """HTTP requests that it has now."""

    def __post_init__(self) -> None:
        self.requests = self._bucket(self.key.requests_per_minute)
        self.tokens = self._bucket(self.key.tokens_per_minute)

    def admit(self, *, takes_place: bool = True) -> None:
        """Count a request that begins; the caller must `end` it if it takes a place.

        Args:
            takes_place: whether it counts among those that the key has at a time.

        Raises:
            ApiError: a limit is reached; nothing was counted.
        """
        limit = self.key.max_concurrent
        if takes_place and limit is not None and self.num_open >= limit:
            raise _exceeded(f"This API key may have {limit} requests at a time", wait_s=1.0, code="too_many_concurrent")
        for bucket, unit in ((self.requests, "requests"), (self.tokens, "tokens")):
            if bucket is not None and bucket.level < 1:
                what = f"This API key may use {bucket.size} {unit} per minute"
                raise _exceeded(what, wait_s=bucket.wait_s(1), code="rate_limit_exceeded")
        if self.requests is not None:
            self.requests.take(1)
        self.num_open += takes_place

    def end(self) -> None:
        """Count a request that was admitted as ended."""
        self.num_open -= 1

    def charge(self, num_tokens: int) -> None:
        """Count the tokens of a request that has ended."""
        if self.tokens is not None:
            self.tokens.take(num_tokens)

    def headers(self, *, is_anthropic: bool) -> dict[str, str]:
        """Return the headers with the remaining amounts, in OpenAI's or Anthropic's form; none without limits."""
        found: dict[str, str] = {}
        for unit, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is None:
                continue
            left, full_s = str(max(0, math.floor(bucket.level))), bucket.wait_s(bucket.size)
            if is_anthropic:
                full = datetime.now(UTC) + timedelta(seconds=full_s)
                values = {"limit": str(bucket.size), "remaining": left, "reset": full.strftime("%Y-%m-%dT%H:%M:%SZ")}
                found |= {f"anthropic-ratelimit-{unit}-{name}": value for name, value in values.items()}
            else:
                values = {"limit": str(bucket.size), "remaining": left, "reset": _duration(full_s)}
                found |= {f"x-ratelimit-{name}-{unit}": value for name, value in values.items()}
        return found

    def _bucket(self, size: int | None) -> TokenBucket | None:
        return None if size is None else TokenBucket(size, clock=self.clock)


def _exceeded(what: str, *, wait_s: float, code: str) -> ApiError:
    retry_s = max(1, math.ceil(wait_s))
    return ApiError(
        f"{what}; try again in {retry_s} s.",
        status=429,
        type="rate_limit_error",
        code=code,
        headers={"Retry-After": str(retry_s)},
    )


def _duration(seconds: float) -> str:
    """Return a time as OpenAI writes it: `6m0s`, `1s`, `120ms`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
