"""How the tokens of a request are chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pagewood.engine.api.grammar import Grammar
from pagewood.engine.sampling_parameter import Parameter, parameters_of

MAX_LOGIT_BIAS = 1024
"""Most tokens of a `logit_bias`."""
MAX_BAD_WORDS = 256
"""Most sequences of a `bad_words`."""
MAX_BAD_WORD_TOKENS = 32
"""Most tokens of each."""
MAX_LOGITS_PROCESSORS = 8
"""Most `logits_processors` of a request."""
MAX_PROCESSOR_NAME = 128
"""Longest name of a logits processor, in characters."""
MAX_PROCESSOR_ARGUMENTS_BYTES = 4096
"""Longest arguments of a logits processor, in bytes of UTF-8."""
MAX_LOGPROBS = 64
"""Most alternatives that are reported for a token."""

MAX_INNER_BYTES = 64 << 20
"""Most bytes of the experts, and of the hidden states, that are reported of a request of its full length."""

MAX_KEPT_TOKENS = MAX_INNER_BYTES // 4
"""Most tokens that are reported as left by the filters, for all output tokens of a request together."""


@dataclass(frozen=True, slots=True)
class LogitsProcessor:
    """A call of one of the functions of `EngineConfig.logits_processors`, for every token of a request.

    Raises:
        ValueError: a field is too long, or there is no name.
    """

    name: str
    """Which function."""
    arguments: str = "{}"
    """Its keyword arguments, a JSON object."""

    def __post_init__(self) -> None:
        """Check the lengths."""
        if not 1 <= len(self.name) <= MAX_PROCESSOR_NAME:
            raise ValueError(f"name must have 1 to {MAX_PROCESSOR_NAME} characters, got {len(self.name)}")
        size = len(self.arguments.encode(errors="surrogatepass"))
        if size > MAX_PROCESSOR_ARGUMENTS_BYTES:
            raise ValueError(f"arguments must have at most {MAX_PROCESSOR_ARGUMENTS_BYTES} bytes, got {size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when generation ends.

    `temperature` 0 is greedy. `top_n_sigma` 0, `top_k` 0, `top_p` 1, `min_p` 0 and `typical_p` 1 switch those filters
    off. With a `seed`, the tokens are a function of (weights, prompt, parameters) only.

    Logits are changed in this order. Then filters apply in the order top_n_sigma, temperature, top_k, top_p, min_p,
    typical_p:

    - `repetition_penalty` r, of each token in prompt or output: a positive logit is divided by r, another multiplied.
      Source: Keskar et al., CTRL, 2019.
    - `frequency_penalty` is subtracted once for each occurrence of a token in the output, `presence_penalty` once for a
      token that occurs. Source: OpenAI's API.
    - `logit_bias`, pairs of a token and a number, is added.
    - Until there are `min_tokens` output tokens, those that would end the request get no probability.
    - A token that would complete one of the `bad_words` gets no probability. The tokens before it may lie in the
      prompt, as in `transformers`.
    - Tokens that the `grammar` does not allow get no probability.
    - The `logits_processors` run in their order.

    Raises:
        ValueError: a field is out of its range.
    """

    max_tokens: int | None = 128
    """Most output tokens; None: as many as the engine's `max_length` leaves."""
    temperature: Annotated[float, Parameter(low=0, high=100, off=0, is_recommended=True)] = 1.0
    top_k: Annotated[int, Parameter(low=0, high=2**31 - 1, off=0, is_recommended=True)] = 0
    top_p: Annotated[float, Parameter(low=0, high=1, excludes_low=True, off=1, is_recommended=True)] = 1.0
    min_p: Annotated[float, Parameter(low=0, high=1, off=0, is_recommended=True)] = 0.0
    typical_p: Annotated[float, Parameter(low=0, high=1, excludes_low=True, off=1, is_recommended=True)] = 1.0
    """In (0, 1]. Of the tokens that the other filters leave, those are kept whose surprisal is nearest to the entropy,
    until their share of the probability reaches `typical_p`. Source: Meister et al., Locally typical sampling, 2022."""
    top_n_sigma: Annotated[float, Parameter(low=0, high=1000, off=0)] = 0.0
    """At most 1,000. Tokens are kept whose logit is at least the largest one less this many standard deviations of the
    row's logits. The deviation is that of all logits that are finite, so what a grammar or a bias of minus infinity
    rules out does not count. Logits are not divided by the temperature before, which would change nothing. Source: Tang
    et al., Top-n-sigma: Not all logits are you need, 2024; first in the order as in llama.cpp."""
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: Annotated[float, Parameter(low=0, high=100, excludes_low=True, is_recommended=True)] = 1.0
    """Above 0, at most 100; 1: off."""
    frequency_penalty: Annotated[float, Parameter(low=-2, high=2)] = 0.0
    """In [-2, 2]."""
    presence_penalty: Annotated[float, Parameter(low=-2, high=2)] = 0.0
    """In [-2, 2]."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """At most 1,024 distinct tokens, each with a number in [-100, 100], or minus infinity for none of its kind."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that the output must not complete: at most 256, each of 1 to 32 tokens."""
    min_tokens: int = 0
    """Output tokens before a stop token can be drawn; at most `max_tokens`."""
    logprobs: int | None = None
    """How many of the most probable tokens are reported with each output token and its own log probability, at most
    64; 0: none but its own, None: nothing is reported."""
    logprobs_kind: Literal["raw", "processed"] = "raw"
    """raw: of the model's distribution, before anything is changed; processed: of the distribution that the token was
    drawn from, after penalties, biases, grammar, processors, temperature and filters."""
    kept_tokens: int | None = None
    """Most tokens, for the whole output, that are reported as left by the filters; at most 16,777,216 (64 MiB). With
    each output token all those are reported from which it was drawn, after penalties, biases, grammar and processors
    too; if greedy, only itself. The output token whose tokens would exceed this number is reported without any, and so
    are all later ones. It needs `logprobs`. None: nothing is reported."""
    prompt_logprobs: int | None = None
    """Like `logprobs`, for each prompt token from `prompt_logprobs_start` on, always raw. The prompt is then computed
    from the token before that one on, also where it is cached."""
    prompt_logprobs_start: int = 1
    """Index of the first prompt token that `prompt_logprobs` reports. At least 1: the first token of a prompt, which
    has the index 0, has no probability."""
    routed_experts_from: int | None = None
    """First position of prompt and output at which the experts are reported that routers choose for the token; -1: the
    last one of the prompt, None: nothing is reported. It is at most the length of the prompt, and the values of all
    positions from there on have at most 64 MiB. The token drawn last is not computed, so it has none. The prompt is
    computed from there on, also where it is cached."""
    hidden_states_from: int | None = None
    """The same for the hidden states behind the last norm, of which the logits of the next token are made; from -1 on,
    they are those from which the output was drawn."""
    grammar: Grammar | None = None
    """What the output may be; None: anything."""
    logits_processors: tuple[LogitsProcessor, ...] = ()
    """Functions of `EngineConfig.logits_processors` that change the logits, at most 8."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {self.max_tokens}")
        for name, parameter in SAMPLING_PARAMETERS.items():
            parameter.check(name, getattr(self, name))
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must fit in 64 signed bits, got {self.seed}")
        if len(self.logit_bias) > MAX_LOGIT_BIAS or len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise ValueError(
                f"logit_bias must name at most {MAX_LOGIT_BIAS} tokens, each once, got {len(self.logit_bias)} pairs"
            )
        for token, bias in self.logit_bias:
            if not 0 <= token < 2**31:
                raise ValueError(f"logit_bias must name token ids in [0, 2**31), got {token}")
            if not (-100.0 <= bias <= 100.0 or bias == -math.inf):
                raise ValueError(f"logit_bias must have numbers in [-100, 100] or minus infinity, got {bias}")
        self._check_bad_words()
        if not 0 <= self.min_tokens < 2**31 or (self.max_tokens is not None and self.min_tokens > self.max_tokens):
            limit = "2**31" if self.max_tokens is None else f"max_tokens ({self.max_tokens})"
            raise ValueError(f"min_tokens must be >= 0 and at most {limit}, got {self.min_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_LOGPROBS:
                raise ValueError(f"{name} must be None or in [0, {MAX_LOGPROBS}], got {value}")
        if self.kept_tokens is not None and not 1 <= self.kept_tokens <= MAX_KEPT_TOKENS:
            raise ValueError(f"kept_tokens must be None or in [1, {MAX_KEPT_TOKENS}], got {self.kept_tokens}")
        if self.kept_tokens is not None and self.logprobs is None:
            raise ValueError(f"kept_tokens must be None where logprobs is None, got {self.kept_tokens}")
        if self.prompt_logprobs_start < 1:
            raise ValueError(f"prompt_logprobs_start must be >= 1, got {self.prompt_logprobs_start}")
        for name in ("routed_experts_from", "hidden_states_from"):
            value = getattr(self, name)
            if value is not None and value < -1:
                raise ValueError(f"{name} must be None, -1 or a position, got {value}")
        if self.logprobs_kind not in ("raw", "processed"):
            raise ValueError(f"logprobs_kind must be 'raw' or 'processed', got {self.logprobs_kind!r}")
        if len(self.logits_processors) > MAX_LOGITS_PROCESSORS:
            raise ValueError(
                f"logits_processors must hold at most {MAX_LOGITS_PROCESSORS}, got {len(self.logits_processors)}"
            )

    @property
    def changes_logits(self) -> bool:
        """Whether logits are changed before the filters."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        changes = self.logit_bias or self.bad_words or self.min_tokens > 0 or self.grammar is not None
        return penalties != (1.0, 0.0, 0.0) or bool(changes) or bool(self.logits_processors)

    def _check_bad_words(self) -> None:
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise ValueError(f"bad_words must hold at most {MAX_BAD_WORDS} sequences, got {len(self.bad_words)}")
        for word in self.bad_words:
            if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
                raise ValueError(f"bad_words must hold sequences of 1 to {MAX_BAD_WORD_TOKENS} tokens, got {len(word)}")
            for token in word:
                if not 0 <= token < 2**31:
                    raise ValueError(f"bad_words must hold token ids in [0, 2**31), got {token}")


SAMPLING_PARAMETERS: Mapping[str, Parameter] = parameters_of(SamplingParams)
"""The numbers among the fields of `SamplingParams` that have a declaration, by name."""
