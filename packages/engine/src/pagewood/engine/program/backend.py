"""The requests of a program to a model, and the Protocol of their backends: an engine in this process, or a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pagewood.engine.api import Grammar
from pagewood.engine.text import ChatMessage, Tokenizer

if TYPE_CHECKING:
    from pagewood.engine.program.tools import Offer

OnText = Callable[[str], None]
"""Gets each new piece of a text, in any thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request, or of several together."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the cache."""
    num_output_tokens: int = 0
    """As the backend counts them; `select` has none."""

    @property
    def hit_rate(self) -> float:
        """The share of the prompt tokens that came from the cache; 0 without prompt tokens."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    def __add__(self, other: Usage) -> Usage:
        """Return the tokens of both."""
        return Usage(
            num_prompt_tokens=self.num_prompt_tokens + other.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens + other.num_cached_tokens,
            num_output_tokens=self.num_output_tokens + other.num_output_tokens,
        )


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model has written."""

    name: str
    arguments: dict[str, Any]
    id: str = ""
    """Empty: the model has written no id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The value of a variable: a generated text, or the choice with the best score."""

    text: str
    """All of it, with calls as the model writes them."""
    finish: str
    """Why the text ended: "stop" or "length"."""
    usage: Usage
    scores: Mapping[str, float] = field(default_factory=dict[str, float])
    """After `select`: for each choice, the mean of the log probabilities of its tokens. After `gen`: empty."""
    calls: tuple[ToolCall, ...] = ()
    """The calls of `gen` with tools."""
    content: str | None = None
    """The text of `gen` with tools, without calls and reasoning; None: it had no tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The text before a variable: plain, or a conversation that the model's chat template renders."""

    is_conversation: bool = False
    """Whether the text has roles."""
    messages: tuple[ChatMessage, ...] = ()
    """Complete turns."""
    tools: tuple[dict[str, Any], ...] = ()
    """Tools that the prompt describes to the model, in the form of OpenAI's API."""
    is_open: bool = True
    """Whether the assistant's turn has begun after the messages."""
    text: str = ""
    """Plain text, or the beginning of the assistant's turn, kept exactly."""

    def render(self, tokenizer: Tokenizer) -> str:
        """Return the whole text.

        Raises:
            ChatTemplateError: it has roles, and the model has no chat template or its template rejects the messages.
        """
        if not self.is_conversation:
            return self.text
        tools = self.tools or None
        return tokenizer.render_chat(self.messages, tools=tools, add_generation_prompt=self.is_open) + self.text

    def encode(self, tokenizer: Tokenizer, *, more: str = "") -> list[int]:
        """Return the token ids of the text followed by `more`, as `LLM.chat` and `LLM.generate` encode them.

        Raises:
            ChatTemplateError: as in `render`.
        """
        text = self.render(tokenizer) + more
        return tokenizer.encode(text, add_special_tokens=not self.is_conversation).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The sampling parameters of `gen`. None stands for the default of the model."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    grammar: Grammar | None = None
    offer: Offer | None = None
    """Functions that may be called; the prompt has them, too."""


class Backend(Protocol):
    """Answers the requests of programs. Its methods are called in any thread and do not wait for the answer.

    Of two requests, the one with the higher `priority` goes first. Cancelling a future ends its requests. Later
    failures, such as a refusal, are exceptions of the future.
    """

    def render(self, prompt: Prompt) -> str:
        """Return the whole text of a prompt, by the model's chat template if it has messages.

        Raises:
            ChatTemplateError: the model has no chat template, or its template rejects the messages.
        """
        ...

    def complete(
        self, prompt: Prompt, sampling: Sampling, priority: int, *, on_text: OnText | None = None
    ) -> Future[Answer]:
        """Continue a text; `on_text` gets the new text as it is computed, None: no pieces are wanted."""
        ...

    def score(self, prompt: Prompt, choices: Sequence[str], priority: int) -> Future[Answer]:
        """Score each choice as the continuation of a text, and answer with the best.

        The score of a choice is the mean of the natural logarithms of the probabilities of its tokens. Its tokens are
        those of text and choice together, without the common beginning of all these texts and the text alone
        (`num_shared`). With equal scores the first choice wins.
        """
        ...


def num_shared(prompts: Sequence[Sequence[object]]) -> int:
    """Return the number of tokens that all prompts share at their beginning.

    Raises:
        ValueError: they share no token, so the first token of a choice would have no probability.
    """
    shortest = min(prompts, key=len)
    count = next(
        (index for index, token in enumerate(shortest) if any(one[index] != token for one in prompts)), len(shortest)
    )
    if count == 0:
        raise ValueError("select must follow a text: the first token of a prompt has no probability")
    return count


def best_choice(choices: Sequence[str], logprobs: Sequence[Sequence[float]], usage: Usage) -> Answer:
    """Return the answer of `select`, from the log probabilities of the tokens of each choice.

    Raises:
        ValueError: a choice has no tokens.
    """
    for choice, each in zip(choices, logprobs, strict=True):
        if not each:
            raise ValueError(f"choices must add tokens to the text, got {choice!r}")
    scores = {choice: sum(each) / len(each) for choice, each in zip(choices, logprobs, strict=True)}
    return Answer(text=max(scores, key=lambda choice: scores[choice]), finish="stop", usage=usage, scores=scores)
