"""Training rows: endless conversations cut to a length, with the answers marked."""

import random
from collections.abc import Callable, Iterator

import torch
from dialog import system_message, turns
from tasks import Turn
from tokenizer import ASSISTANT, END, PAD, SYSTEM, USER
from tokenizers import Tokenizer
from tool_dialog import offer, tool_turns
from torch import Tensor

SHORT_ROWS = ((192, 1.0),)
MIXED_ROWS = ((192, 0.75), (512, 0.2), (1024, 0.05))
"""Row lengths with their shares: short rows train faster, long rows teach long conversations."""
TOOL_ROWS = ((512, 0.6), (1024, 0.4))


class Encoder:
    """Encodes conversations like the chat template, and marks the tokens that the assistant writes.

    `tone` changes the words of answers.
    """

    def __init__(self, tokenizer: Tokenizer, *, tone: Callable[[str], str] = str) -> None:
        self.tokenizer = tokenizer
        self.tone = tone
        self.end, self.pad, self.system, self.user, self.assistant = (
            tokenizer.token_to_id(text) for text in (END, PAD, SYSTEM, USER, ASSISTANT)
        )

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text.strip()).ids

    def system_part(self, text: str) -> list[int]:
        return [self.system, *self.ids(text), self.end]

    def turn_parts(self, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        """Return the tokens before the answer, and the answer with its end token."""
        return [self.user, *self.ids(prompt), self.end, self.assistant], [*self.ids(self.tone(answer)), self.end]


Conversation = tuple[str | None, Iterator[tuple[Turn, ...]]]
"""A system message, and turns; the turns of a tuple belong together."""


def conversation(rng: random.Random, *, later: bool, tools: bool) -> Conversation:
    if tools:
        offered = offer(rng)
        return offered.text(), tool_turns(rng, offered)
    return system_message(rng), ((turn,) for turn in turns(rng, later=later))


def row(
    encoder: Encoder, rng: random.Random, length: int, *, later: bool = False, tools: bool = False
) -> tuple[list[int], list[bool]]:
    """Return one conversation of `length` tokens; turns that do not fit completely are left out."""
    while True:
        tokens: list[int] = []
        marks: list[bool] = []
        system, groups = conversation(rng, later=later, tools=tools)
        if system is not None:
            tokens += encoder.system_part(system)
            marks += [False] * len(tokens)
        for group in groups:
            parts = [encoder.turn_parts(turn.prompt, turn.answer) for turn in group]
            if len(tokens) + sum(len(asked) + len(answered) for asked, answered in parts) > length:
                break
            for asked, answered in parts:
                tokens += asked + answered
                marks += [False] * len(asked) + [True] * len(answered)
        if any(marks):
            padding = length - len(tokens)
            return tokens + [encoder.pad] * padding, marks + [False] * padding


def batch(
    encoder: Encoder, seed: str, num_tokens: int, *, later: bool, long: bool, tools: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the batch of a seed; `tools` is the probability that its conversations may offer tools.

    Returns:
        [rows, length] int64 tokens; [num] int64, the flat positions that predict an answer's token;
        [num] int64, those tokens.
    """
    rng = random.Random(seed)
    has_tools = tools > 0 and rng.random() < tools
    lengths, shares = zip(*(TOOL_ROWS if has_tools else MIXED_ROWS if long else SHORT_ROWS), strict=True)
    length = rng.choices(lengths, shares)[0]
    rows = [row(encoder, rng, length, later=later, tools=has_tools) for _ in range(num_tokens // length)]
    tokens = torch.tensor([tokens for tokens, _ in rows])
    marks = torch.tensor([marks for _, marks in rows])
    at = marks.flatten().nonzero().flatten()
    return tokens, at - 1, tokens.flatten()[at]
