"""Vectors and scores of texts, for `LLM` and `AsyncLLM`: arguments to requests, and answers to arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from pagewood.engine.api import Delta, PoolingParams, Submit
from pagewood.engine.core.loop import EngineInfo
from pagewood.engine.model_folder.vector_recipe import HeadScoring, Scoring, cosine, cut, with_end
from pagewood.engine.offline.arguments import Arguments, Prompts
from pagewood.engine.offline.calls import Call

Vectors = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedDocument:
    """A document in the order of its relevance."""

    index: int
    """Its place among the documents of the call."""
    score: float
    """With a reranker in [0, 1]; otherwise the cosine of two vectors, in [-1, 1]."""


class VectorRequests:
    """Turns the arguments of calls for vectors and scores into requests for one engine.

    Args:
        arguments: checks prompts, and gives requests their ids.
        info: of the engine.
    """

    __slots__ = ("_arguments", "_max_tokens", "_recipe", "_size")

    def __init__(self, arguments: Arguments, info: EngineInfo) -> None:
        self._arguments = arguments
        self._recipe = arguments.recipe
        self._max_tokens = self._recipe.longest(info.max_length)
        self._size = self._recipe.size or info.vector_size

    @property
    def scoring(self) -> Scoring | None:
        """How pairs get scores; None: by the cosine of their vectors."""
        return self._recipe.scoring

    def of_prompts(
        self,
        prompts: Prompts,
        pooling: PoolingParams | None,
        prompt_name: str | None,
        priority: object,
        *,
        truncate: bool = False,
    ) -> list[Submit]:
        """Return the requests for the vectors of prompts; with `truncate`, one that is too long loses its end.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an argument has a wrong value, or a prompt is too long.
        """
        if isinstance(self.scoring, HeadScoring):
            raise ValueError("this model scores pairs of texts and makes no vectors: use rerank instead")
        pooling = self._recipe.pooling if pooling is None else pooling
        if not isinstance(cast("object", pooling), PoolingParams):
            raise TypeError(f"pooling must be PoolingParams or None, got {pooling!r:.80}")
        several = [prompts] if isinstance(prompts, str) else prompts
        if isinstance(several, Sequence):  # a flat list of numbers is one prompt
            several = [
                self._recipe.text(one, prompt_name=prompt_name) if isinstance(one, str) else one for one in several
            ]
        tokens = self._arguments.prompts(several)
        for index, one in enumerate(tokens):
            text = cast("Sequence[object]", several)[index]
            if isinstance(text, str):
                tokens[index] = one = with_end(np.frombuffer(one, "<i4"), self._recipe.end_token).tobytes()
            if truncate and len(one) // 4 > self._max_tokens:
                whole = np.frombuffer(one, "<i4")
                inner = whole
                if isinstance(text, str):
                    inner = self._arguments.tokenizer.encode(text, add_special_tokens=False)
                tokens[index] = cut(whole, inner, self._max_tokens).tobytes()
        self._check_lengths(tokens, "prompts")
        return self._with_pooling(tokens, pooling, priority)

    def _check_lengths(self, tokens: Sequence[bytes], name: str) -> None:
        for index, one in enumerate(tokens):
            if len(one) // 4 > self._max_tokens:
                raise ValueError(f"{name}[{index}] must have at most {self._max_tokens} tokens, got {len(one) // 4}")

    def _with_pooling(self, tokens: list[bytes], pooling: PoolingParams, priority: object) -> list[Submit]:
        return [
            msgspec.structs.replace(submit, pooling=pooling)
            for submit in self._arguments.submits(tokens, None, priority)
        ]

    def of_query(
        self,
        query: str,
        documents: Sequence[str],
        instruction: str | None,
        priority: object,
        *,
        top_n: int | None,
        truncate: bool = False,
    ) -> list[Submit]:
        """Return the requests that find the scores of documents for a query; `ranked` reads their answers.

        `top_n` is only checked. With `truncate`, the longer text of a pair that is too long loses its end.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an argument has a wrong value.
        """
        several: list[object] = list(documents)
        if isinstance(documents, str) or not all(isinstance(one, str) for one in [query, *several]):
            raise TypeError(f"query must be a string, and documents a sequence of strings, got {documents!r:.80}")
        if top_n is not None and top_n < 1:
            raise ValueError(f"top_n must be None or >= 1, got {top_n}")
        if not several:
            raise ValueError("documents must hold at least one string, got none")
        scoring = self.scoring
        if scoring is None:
            if instruction is not None:
                raise ValueError(f"instruction must be None for a model that is no reranker, got {instruction!r:.80}")
            recipe = self._recipe
            names = (recipe.prompt_of("query"), recipe.prompt_of("document"))
            of_query = self.of_prompts(query, None, names[0], priority, truncate=truncate)
            return of_query + self.of_prompts(documents, None, names[1], priority, truncate=truncate)
        if isinstance(scoring, HeadScoring):
            if instruction is not None:
                raise ValueError(f"instruction must be None for a reranker with a head, got {instruction!r:.80}")
            longest = self._max_tokens if truncate else None
            tokens = [self._arguments.pair(query, one, scoring.type_stride, longest) for one in documents]
            self._check_lengths(tokens, "documents")
            return self._with_pooling(tokens, scoring.pooling, priority)
        if truncate:
            raise ValueError("truncate must be False for a reranker whose prompt would lose its end, got True")
        if scoring.has_template:
            pairs = [scoring.messages(query, one, instruction=instruction) for one in documents]
            tokens = self._arguments.conversations(pairs)
        else:
            tokens = self._arguments.prompts([scoring.text(query, one, instruction=instruction) for one in documents])
        return self._arguments.submits(tokens, scoring.sampling, priority)

    def vectors(self, call: Call) -> Vectors:
        """Return the vectors from the answers of a call, `[num_prompts, dim] float32`.

        Raises:
            ValueError: the engine refused a prompt.
        """
        found = [np.frombuffer(end.vector, "<f4").astype(np.float32) for end in _ends(call)]
        return np.stack(found) if found else np.empty((0, self._size), np.float32)

    def ranked(self, call: Call, top_n: int | None) -> list[RankedDocument]:
        """Return the best `top_n` documents of a call, or all, best first, equal ones in their order.

        Raises:
            ValueError: the engine refused a pair.
        """
        if self.scoring is None:
            query, *documents = self.vectors(call)
            scores = [cosine(query, document) for document in documents]
        elif isinstance(self.scoring, HeadScoring):
            scores = [self.scoring.score(vector) for vector in self.vectors(call)]
        else:
            _ends(call)
            scores = [self.scoring.score(completion.logprobs) for completion in call.completions()]
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        return [RankedDocument(index=index, score=scores[index]) for index in order[:top_n]]


def _ends(call: Call) -> list[Delta]:
    """Return the last answer to each request of a call.

    Raises:
        ValueError: the engine refused one.
    """
    ends = call.ends()
    for index, end in enumerate(ends):
        if end.refusal is not None:
            raise ValueError(f"request {index} was refused: {end.refusal.message}")
    return ends
