"""Requests for tests."""

from dataclasses import dataclass
from random import Random


@dataclass(slots=True, kw_only=True, eq=False)
class FakeRequest:
    """A request with every attribute that any policy reads; tests may change every field."""

    arrival: int
    arrived_s: float = 0.0
    priority: int = 0  # written by: traffic
    num_tokens: int = 64  # written by: traffic, testing.routing
    num_matched: int = 0  # written by: traffic, testing.routing, router
    num_generated: int = 0  # written by: traffic, testing.routing
    max_new_tokens: int = 16
    tenant: str = ""  # written by: traffic
    deadline_s: float = float("inf")  # written by: traffic
    service_class: str = ""  # written by: traffic
    tag: str = ""  # written by: traffic
    num_computed: int = 0  # written by: traffic
    text: bytes = b""
    """Four bytes for each token of the prompt."""

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return self.num_tokens - self.num_generated

    def prefix(self, num_tokens: int) -> bytes:
        """Return the first tokens of the prompt as bytes."""
        return self.text[: 4 * num_tokens]

    def window(self, start: int, end: int) -> bytes:
        """Return the tokens [start, end) of the prompt as bytes."""
        return self.text[4 * start : 4 * end]

    def num_shared(self, other: "FakeRequest", /) -> int:
        """Return how many leading tokens of the prompts are the same."""
        num_tokens = min(len(self.text), len(other.text)) // 4
        while self.text[: 4 * num_tokens] != other.text[: 4 * num_tokens]:
            num_tokens -= 1
        return num_tokens


def random_request(rng: Random, arrival: int, now_s: float) -> FakeRequest:
    """Return a request that arrives now; its prompt has few different tokens, so that prefixes are shared."""
    num_tokens = rng.choice((2, 5, 9, 40, 80))
    text = b"".join(rng.choices((b"AAAA", b"BBBB", b"BBBC"), (8, 1, 1), k=num_tokens))
    return FakeRequest(
        arrival=arrival,
        arrived_s=now_s,
        priority=rng.choice((0, 0, 0, 1, -1)),
        num_tokens=num_tokens,
        num_matched=rng.randrange(num_tokens),
        max_new_tokens=rng.choice((1, 16, 100)),
        tenant=rng.choice(("a", "b", "c")),
        deadline_s=now_s + rng.choice((1.0, 10.0, float("inf"))),
        service_class=rng.choice(("gold", "bronze")),
        tag=rng.choice(("x", "y", "z")),
        text=text,
    )
