"""`POST /v1/rerank` and `/v1/score`: how well documents answer a query, in the forms of Cohere, Jina and vLLM."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

import msgspec
import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from pagewood.engine.api import RequestOptions
from pagewood.engine.model_folder.vector_recipe import HeadScoring, PairScoring, Scoring, VectorRecipe, cosine
from pagewood.server.http.errors import ApiError
from pagewood.server.http.validation import WHOLE, kind, parse
from pagewood.server.messages import wire
from pagewood.server.protocols.common.collected import Collected, PromptUsage, Work
from pagewood.server.protocols.common.fields import IGNORED, INT32_MAX
from pagewood.server.protocols.common.vectors import Cut, longest, vector_request
from pagewood.server.requests.live import new_request_id

MAX_DOCUMENTS = 2048

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "rank_fields": (None, []),
    "max_chunks_per_doc": (None,),
    "max_tokens_per_doc": (None,),
    "softmax_temperature": (None,),
    "request_id": (None,),
    "mm_processor_kwargs": (None, {}),
}
"""Fields of other servers that are not supported -> their neutral values, which have no effect and are accepted."""

_Priority = Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX), WHOLE] | None


def _documents(value: Any) -> list[str]:
    """Return the texts of documents: strings, or objects with a `text`."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"expected a non-empty array of strings or objects with 'text', but got {kind(value)} instead")
    texts: list[str] = []
    for item in cast("list[Any]", value):
        text = cast("dict[str, Any]", item).get("text") if isinstance(item, dict) else item
        if not isinstance(text, str):
            raise ValueError(f"expected strings or objects with 'text', but got {kind(item)} among them")
        texts.append(text)
    return texts


def _texts(value: Any) -> list[str]:
    """Return the texts of a string or of an array of strings."""
    if isinstance(value, str):
        return [value]
    items = cast("list[Any]", value)
    if not isinstance(value, list) or not items or not all(isinstance(item, str) for item in items):
        raise ValueError(f"expected a string or a non-empty array of strings, but got {kind(value)} instead")
    return items


class TextDocument(BaseModel):
    """A document as an object. Its other fields have no effect."""

    text: str


# The types that these validators accept, for the schemas of bodies.
_Documents = Annotated[list[str | TextDocument], Field(min_length=1, max_length=MAX_DOCUMENTS)]
_Texts = str | Annotated[list[str], Field(min_length=1, max_length=MAX_DOCUMENTS)]


class RerankRequest(BaseModel):
    """The body of `/v1/rerank`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    query: str
    documents: Annotated[list[str], BeforeValidator(_documents, _Documents)]
    top_n: Annotated[int, Field(ge=1), WHOLE] | None = None
    return_documents: bool | None = None
    instruct: str | None = None
    """The instruction for a reranker, as in SGLang."""
    truncate_prompt_tokens: Cut = None
    """See `EmbeddingRequest`; of a pair, the longer text loses its end."""
    priority: _Priority = None


class ScoreRequest(BaseModel):
    """The body of `/v1/score`: one text and several, or as many of one kind as of the other."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    text_1: Annotated[list[str], BeforeValidator(_texts, _Texts)]
    text_2: Annotated[list[str], BeforeValidator(_texts, _Texts)]
    instruct: str | None = None
    truncate_prompt_tokens: Cut = None
    priority: _Priority = None


class _Document(msgspec.Struct, frozen=True):
    text: str


class Ranked(msgspec.Struct, frozen=True):
    """A document of a ranking."""

    index: int
    """Its place in the request, from 0."""
    relevance_score: float
    document: _Document | msgspec.UnsetType = msgspec.UNSET


class Ranking(msgspec.Struct, frozen=True):
    """Documents, the most relevant first."""

    id: str
    model: str
    results: list[Ranked]
    usage: PromptUsage


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """The score of one pair."""

    index: int
    object: Literal["score"] = "score"
    score: float


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """The scores of all pairs, in their order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    """Unix time, seconds."""
    model: str
    data: list[Score]
    usage: PromptUsage


def parse_rerank(body: bytes) -> RerankRequest:
    """Return the request that `body` holds.

    Raises:
        ApiError: a field is wrong, missing, unknown or not supported.
    """
    request = parse(RerankRequest, body, neutral=NEUTRAL, ignored=IGNORED)
    _check_number("documents", len(request.documents))
    return request


def parse_score(body: bytes) -> ScoreRequest:
    """Return the request that `body` holds.

    Raises:
        ApiError: a field is wrong, missing, unknown or not supported.
    """
    request = parse(ScoreRequest, body, neutral=NEUTRAL, ignored=IGNORED)
    num_first, num_second = len(request.text_1), len(request.text_2)
    if num_first not in (1, num_second):
        raise ApiError(
            f"Invalid value for 'text_1': expected 1 text or {num_second}, as in 'text_2', but got {num_first}.",
            param="text_1",
            code="invalid_value",
        )
    _check_number("text_2", num_second)
    return request


def rerank(request: RerankRequest, recipe: VectorRecipe, model: wire.Model, *, answer_id: str, model_name: str) -> Work:
    """Return the content of a request for a ranking.

    Raises:
        ApiError: `instruct` is given for a model that is no reranker.
    """
    texts = request.documents

    def render(found: Sequence[Collected], usage: PromptUsage) -> bytes:
        scores = _scores(found, recipe.scoring, num_first=1)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n]
        shown = [_Document(texts[i]) if request.return_documents else msgspec.UNSET for i in order]
        results = [Ranked(index, scores[index], text) for index, text in zip(order, shown, strict=True)]
        return msgspec.json.encode(Ranking(answer_id, model_name, results, usage))

    names = (recipe.prompt_of("query"), recipe.prompt_of("document"))
    requests = _requests(
        [request.query], texts, recipe, model, names=names, params=("query", "documents"), instruct=request.instruct,
        cut=request.truncate_prompt_tokens, priority=request.priority or 0,
    )  # fmt: skip
    return Work(requests=requests, prompt_param="documents", render=render)


def score(request: ScoreRequest, recipe: VectorRecipe, model: wire.Model, *, answer_id: str, model_name: str) -> Work:
    """Return the content of a request for scores.

    Raises:
        ApiError: `instruct` is given for a model that is no reranker.
    """
    num_first = len(request.text_1)

    def render(found: Sequence[Collected], usage: PromptUsage) -> bytes:
        scores = _scores(found, recipe.scoring, num_first=num_first)
        data = [Score(index=index, score=one) for index, one in enumerate(scores)]
        answer = Scores(id=answer_id, created=int(time.time()), model=model_name, data=data, usage=usage)
        return msgspec.json.encode(answer)

    requests = _requests(
        request.text_1, request.text_2, recipe, model, names=(None, None), params=("text_1", "text_2"),
        instruct=request.instruct, cut=request.truncate_prompt_tokens, priority=request.priority or 0,
    )  # fmt: skip
    return Work(requests=requests, prompt_param="text_2", render=render)


def _requests(
    first: Sequence[str],
    second: Sequence[str],
    recipe: VectorRecipe,
    model: wire.Model,
    *,
    names: tuple[str | None, str | None],
    params: tuple[str, str],
    instruct: str | None,
    cut: int | None,
    priority: int,
) -> list[wire.Generate]:
    """Return the requests that find the scores of pairs: one for each pair, or one for each text if vectors do."""
    scoring = recipe.scoring
    queries = first if len(first) == len(second) else [first[0]] * len(second)
    if isinstance(scoring, HeadScoring):
        _refuse_instruct(instruct)
        return [
            wire.Generate(
                request_id=new_request_id("req"),
                prompt=wire.PairPrompt(first=one, second=other, type_stride=scoring.type_stride),
                options=RequestOptions(pooling=scoring.pooling, priority=priority, adapter=model.adapter),
                max_length=longest(cut, recipe, model),
                cuts_prompt=cut is not None,
            )
            for one, other in zip(queries, second, strict=True)
        ]
    if scoring is not None:
        if cut is not None:
            raise ApiError(
                "Unsupported parameter: 'truncate_prompt_tokens' is for models that embed texts or have a head for "
                "scores, and this one reads a prompt that would lose its end.",
                param="truncate_prompt_tokens",
                code="unsupported_parameter",
            )
        return [
            wire.Generate(
                request_id=new_request_id("req"),
                prompt=_pair(scoring, *pair, instruct),
                options=RequestOptions(sampling=scoring.sampling, priority=priority, adapter=model.adapter),
                max_length=model.max_length,
            )
            for pair in zip(queries, second, strict=True)
        ]
    _refuse_instruct(instruct)
    return [
        vector_request(
            text, recipe, model, pooling=recipe.pooling, prompt_name=name, priority=priority, param=param, cut=cut
        )
        for texts, name, param in zip((first, second), names, params, strict=True)
        for text in texts
    ]


def _refuse_instruct(instruct: str | None) -> None:
    if instruct is not None:
        raise ApiError(
            "Unsupported parameter: 'instruct' is for rerankers that read one, and this model is none; leave it out.",
            param="instruct",
            code="unsupported_parameter",
        )


def _pair(scoring: PairScoring, query: str, document: str, instruct: str | None) -> wire.Prompt:
    if scoring.has_template:
        return wire.ChatPrompt(messages=tuple(scoring.messages(query, document, instruction=instruct)))
    return wire.TextPrompt(text=scoring.text(query, document, instruction=instruct))


def _scores(found: Sequence[Collected], scoring: Scoring | None, *, num_first: int) -> list[float]:
    """Return the scores of all pairs, from the answers to `_requests`."""
    if isinstance(scoring, HeadScoring):
        return [scoring.score(np.frombuffer(each.vector, "<f4")) for each in found]
    if scoring is not None:
        return [scoring.score_of([(one.token, one.logprob) for one in each.tokens[0].top]) for each in found]
    vectors = [np.frombuffer(each.vector, "<f4") for each in found]
    first, second = vectors[:num_first], vectors[num_first:]
    queries = first if len(first) == len(second) else [first[0]] * len(second)
    return [cosine(query, other) for query, other in zip(queries, second, strict=True)]


def _check_number(param: str, num: int) -> None:
    if num > MAX_DOCUMENTS:
        raise ApiError(
            f"Invalid value for '{param}': expected at most {MAX_DOCUMENTS} texts, but got {num} instead.",
            param=param,
            code="invalid_value",
        )
