"""Training rows: endless conversations cut to a length, with the answers marked."""

import random

import torch
from dialog import system_message, turns
from tokenizer import ASSISTANT, END, PAD, SYSTEM, USER
from tokenizers import Tokenizer
from torch import Tensor

SHORT_ROWS = ((192, 1.0),)
MIXED_ROWS = ((192, 0.75), (512, 0.2), (1024, 0.05))
"""Row lengths with their shares: short rows train faster, long rows teach long conversations."""


class Encoder:
    """Encodes conversations like the chat template, and marks the tokens that the assistant writes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.end, self.pad, self.system, self.user, self.assistant = (
            tokenizer.token_to_id(text) for text in (END, PAD, SYSTEM, USER, ASSISTANT)
        )

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text.strip()).ids

    def system_part(self, text: str) -> list[int]:
        return [self.system, *self.ids(text), self.end]

    def turn_parts(self, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        """Return the tokens before the answer, and the answer with its end token."""
        return [self.user, *self.ids(prompt), self.end, self.assistant], [*self.ids(answer), self.end]


def row(encoder: Encoder, rng: random.Random, length: int, *, later: bool = False) -> tuple[list[int], list[bool]]:
    """Return one conversation of `length` tokens; a turn that does not fit completely is left out."""
    while True:
        tokens: list[int] = []
        marks: list[bool] = []
        if (system := system_message(rng)) is not None:
            tokens += encoder.system_part(system)
            marks += [False] * len(tokens)
        for turn in turns(rng, later=later):
            asked, answered = encoder.turn_parts(turn.prompt, turn.answer)
            if len(tokens) + len(asked) + len(answered) > length:
                break
            tokens += asked + answered
            marks += [False] * len(asked) + [True] * len(answered)
        if any(marks):
            padding = length - len(tokens)
            return tokens + [encoder.pad] * padding, marks + [False] * padding


def batch(encoder: Encoder, seed: str, num_tokens: int, *, later: bool, long: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the batch of a seed.

    Returns:
        [rows, length] int64 tokens; [num] int64, the flat positions that predict an answer's token;
        [num] int64, those tokens.
    """
    rng = random.Random(seed)
    lengths, shares = zip(*(MIXED_ROWS if long else SHORT_ROWS), strict=True)
    length = rng.choices(lengths, shares)[0]
    rows = [row(encoder, rng, length, later=later) for _ in range(num_tokens // length)]
    tokens = torch.tensor([tokens for tokens, _ in rows])
    marks = torch.tensor([marks for _, marks in rows])
    at = marks.flatten().nonzero().flatten()
    return tokens, at - 1, tokens.flatten()[at]
