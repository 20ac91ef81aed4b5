"""The prompts of a load: texts of words, with about the wanted number of tokens, or token ids.

A prompt consists of words from a fixed list. The tokens per word are measured with the server's own counts
(`Words.calibrated`), so no tokenizer is needed. Ids give exact lengths, for completions only.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

_WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company",
    "system", "program", "question", "work", "number", "night", "point", "home", "water", "room", "mother", "area",
    "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue",
    "side", "kind", "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end",
    "member", "law", "car", "city", "name", "team", "minute", "idea", "body", "back", "parent", "face", "level",
    "office", "door", "health", "person", "art", "war", "history", "party", "result", "change", "morning", "reason",
    "girl", "moment", "air", "teacher", "force", "education",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request."""

    prompt: str | tuple[int, ...]
    """The new text or ids of this turn; ids are for completions only."""
    max_tokens: int
    after_s: float | None = None
    """Seconds after the start of the run; None: the arrivals decide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Turns that follow one another; each is sent with all before it."""

    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Words:
    """Makes texts with about a given number of tokens.

    Args:
        tokens_per_word: of the server's tokenizer.
        overhead: tokens that the server adds to each prompt, such as those of a chat template.
    """

    tokens_per_word: float = 1.3
    overhead: float = 0.0

    @classmethod
    def calibrated(cls, short: tuple[int, int], long: tuple[int, int]) -> Words:
        """Return the calibration by two prompts, each given as (words, tokens that the server counted)."""
        slope = (long[1] - short[1]) / (long[0] - short[0])
        if slope <= 0:
            return cls()
        return cls(tokens_per_word=slope, overhead=max(0.0, short[1] - slope * short[0]))

    def text(self, num_tokens: int, rng: random.Random) -> str:
        """Return random words that are about `num_tokens` tokens with the overhead of a prompt."""
        wanted = num_tokens - self.overhead
        return " ".join(rng.choices(_WORDS, k=max(1, round(wanted / self.tokens_per_word))))


def words_of(num_words: int) -> str:
    """Return a text of `num_words` words, to measure how many tokens they have."""
    return " ".join(_WORDS[index % len(_WORDS)] for index in range(num_words))


Maker = Callable[[int, random.Random], str | tuple[int, ...]]
"""Makes a random prompt of a number of tokens."""


def ids_below(vocab_size: int) -> Maker:
    """Return a maker of token ids; the lowest hundredth, where special tokens often are, is left out.

    Raises:
        ValueError: `vocab_size` is below 2.
    """
    if vocab_size < 2:
        raise ValueError(f"vocab_size must be >= 2, got {vocab_size}")
    low = vocab_size // 100
    return lambda num_tokens, rng: tuple(rng.randrange(low, vocab_size) for _ in range(num_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of prompts and answers, uniform in [(1 - spread) n, (1 + spread) n]."""

    num_prompt: int = 256
    num_output: int = 64
    spread: float = 0.0

    def __post_init__(self) -> None:
        for name in ("num_prompt", "num_output"):
            value: int = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        if not 0 <= self.spread < 1:
            raise ValueError(f"spread must be in [0, 1), got {self.spread}")

    def draw(self, mean: int, rng: random.Random) -> int:
        """Return a length."""
        return max(1, round(mean * rng.uniform(1 - self.spread, 1 + self.spread)))


def random_prompts(make: Maker, lengths: Lengths, *, seed: int) -> Iterator[Conversation]:
    """Yield requests with nothing in common, without end."""
    rng = random.Random(seed)
    while True:
        prompt = make(lengths.draw(lengths.num_prompt, rng), rng)
        yield _single(prompt, lengths.draw(lengths.num_output, rng))


def shared_prefixes(
    make: Maker, lengths: Lengths, *, num_groups: int, num_prefix: int, seed: int
) -> Iterator[Conversation]:
    """Yield requests whose prompts begin with one of `num_groups` prefixes of `num_prefix` tokens, without end.

    The lengths do not include the prefix.

    Raises:
        ValueError: a number is below 1.
    """
    if num_groups < 1 or num_prefix < 1:
        raise ValueError(f"num_groups and num_prefix must be >= 1, got {num_groups} and {num_prefix}")
    rng = random.Random(seed)
    prefixes = [make(num_prefix, rng) for _ in range(num_groups)]
    while True:
        rest = make(lengths.draw(lengths.num_prompt, rng), rng)
        yield _single(joined(rng.choice(prefixes), rest), lengths.draw(lengths.num_output, rng))


def conversations(make: Maker, lengths: Lengths, *, num_turns: int, seed: int) -> Iterator[Conversation]:
    """Yield conversations of `num_turns` turns, without end; the lengths are those of a turn.

    If prompts are ids, later turns leave out the answers.

    Raises:
        ValueError: `num_turns` is below 1.
    """
    if num_turns < 1:
        raise ValueError(f"num_turns must be >= 1, got {num_turns}")
    rng = random.Random(seed)
    while True:
        yield Conversation(
            turns=tuple(
                Turn(
                    prompt=make(lengths.draw(lengths.num_prompt, rng), rng),
                    max_tokens=lengths.draw(lengths.num_output, rng),
                )
                for _ in range(num_turns)
            )
        )


def from_file(path: Path, make: Maker, *, num_output: int, speed: float = 1.0) -> Iterator[Conversation]:
    """Yield the requests of a file with one JSON object per line.

    A line with `prompt` is a text, or ids; `max_tokens` or `output_length` is the length of its answer (default
    `num_output`). A line with `hash_ids` is of a Mooncake trace: `input_length`, `output_length`, and the ids of blocks
    of 512 tokens, of which equal ones become equal texts. A line with `timestamp`, in milliseconds, is sent at that
    time, `speed` times as fast.

    Raises:
        ValueError: a line is wrong; the message gives its number.
        OSError: the file cannot be read.
    """
    if not 0 < speed < float("inf"):
        raise ValueError(f"speed must be positive, got {speed}")
    start_ms: float | None = None
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                given = _object(line)
                prompt = _prompt(given, make)
                num = int(given.get("output_length") or given.get("max_tokens") or num_output)
                after_s = None
                if "timestamp" in given:
                    stamp = float(given["timestamp"])
                    start_ms = stamp if start_ms is None else start_ms
                    after_s = (stamp - start_ms) / 1e3 / speed
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path}:{number}: {error}") from None
            yield Conversation(turns=(Turn(prompt=prompt, max_tokens=max(1, num), after_s=after_s),))


@dataclass(slots=True)
class History:
    """The text of a conversation so far, as messages or as one prompt."""

    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])  # written by: say
    text: str | tuple[int, ...] = ""  # written by: say

    def say(self, turn: Turn) -> None:
        """Append a message of the user."""
        self.messages.append({"role": "user", "content": turn.prompt if isinstance(turn.prompt, str) else ""})
        self.text = joined(self.text, turn.prompt) if self.text else turn.prompt

    def answer(self, text: str) -> None:
        """Append an answer."""
        self.messages.append({"role": "assistant", "content": text})
        if isinstance(self.text, str):
            self.text = joined(self.text, text)


def joined(first: str | tuple[int, ...], second: str | tuple[int, ...]) -> str | tuple[int, ...]:
    """Return two parts of a prompt as one."""
    if isinstance(first, str):
        assert isinstance(second, str)
        return f"{first} {second}"
    assert isinstance(second, tuple)
    return first + second


def _single(prompt: str | tuple[int, ...], num_output: int) -> Conversation:
    return Conversation(turns=(Turn(prompt=prompt, max_tokens=num_output),))


def _object(line: str) -> dict[str, Any]:
    given = json.loads(line)
    if not isinstance(given, dict):
        raise ValueError("a line must be a JSON object")
    return cast("dict[str, Any]", given)


_BLOCK = 512


def _prompt(given: dict[str, Any], make: Maker) -> str | tuple[int, ...]:
    match given:
        case {"prompt": str(text)}:
            return text
        case {"prompt": [*ids]} if all(isinstance(id, int) for id in ids):
            return tuple(ids)
        case {"hash_ids": [*blocks], "input_length": int(length)} if length > 0:
            return _of_blocks(blocks, length, make)
        case _:
            raise ValueError("a request must have a prompt (text or ids), or hash_ids and input_length")


def _of_blocks(blocks: Sequence[Any], length: int, make: Maker) -> str | tuple[int, ...]:
    prompt: str | tuple[int, ...] | None = None
    for index, block in enumerate(blocks):
        size = min(_BLOCK, length - index * _BLOCK)
        if size <= 0:
            break
        part = make(size, random.Random(str(block)))
        prompt = part if prompt is None else joined(prompt, part)
    if prompt is None:
        raise ValueError("hash_ids must not be empty")
    return prompt
