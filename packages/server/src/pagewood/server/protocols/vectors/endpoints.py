"""The endpoints of vectors: OpenAI's embeddings, the ranking of Cohere and Jina, and vLLM's score."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.types import ASGIApp

from pagewood.server.http.operations import Operation
from pagewood.server.protocols.common.collected import Work, respond
from pagewood.server.protocols.common.fields import IGNORED
from pagewood.server.protocols.common.models import Models
from pagewood.server.protocols.common.service import Service, names_of
from pagewood.server.protocols.vectors import embeddings, rerank
from pagewood.server.requests.live import new_request_id

TAG = "Vectors"


@dataclass(frozen=True, slots=True)
class VectorEndpoints:
    """Embeddings, rankings and scores."""

    models: Models

    def operations(self) -> list[Operation]:
        """Return the operations."""
        operation = partial(Operation, tag=TAG, ignored=IGNORED)
        name = self.models.names[0]
        return [
            operation(
                name="Embeddings",
                path="/v1/embeddings",
                endpoint=self.embeddings,
                body=embeddings.EmbeddingRequest,
                example={"model": name, "input": ["What is 12 + 7?", "The sum is 19."]},
                neutral=embeddings.NEUTRAL,
                answer=embeddings.Embeddings,
            ),
            operation(
                name="Rerank",
                path="/v1/rerank",
                aliases=("/v2/rerank", "/rerank"),
                endpoint=self.rerank,
                body=rerank.RerankRequest,
                example={"model": name, "query": "What is 12 + 7?", "documents": ["The sum is 19.", "It rains."]},
                neutral=rerank.NEUTRAL,
                answer=rerank.Ranking,
            ),
            operation(
                name="Score",
                path="/v1/score",
                aliases=("/score",),
                endpoint=self.score,
                body=rerank.ScoreRequest,
                example={"model": name, "text_1": "What is 12 + 7?", "text_2": ["The sum is 19.", "It rains."]},
                neutral=rerank.NEUTRAL,
                answer=rerank.Scores,
            ),
        ]

    async def embeddings(self, request: Request) -> ASGIApp:
        """Return the vectors of texts."""
        said = await self.models.reader.read(request, embeddings.parse_embeddings)
        service = await self.models.serving(said.model, request, keep_s=said.ttl)
        model = service.model(said.model)
        work = embeddings.embeddings(said, service.recipe, model, model_name=service.model_name)
        return self._collect(request, service, work, new_request_id("embd"))

    async def rerank(self, request: Request) -> ASGIApp:
        """Return documents in the order of their relevance for a query."""
        said = await self.models.reader.read(request, rerank.parse_rerank)
        service = await self.models.serving(said.model, request)
        model, answer_id = service.model(said.model), new_request_id("rerank")
        name = service.model_name
        work = rerank.rerank(said, service.recipe, model, answer_id=answer_id, model_name=name)
        return self._collect(request, service, work, answer_id)

    async def score(self, request: Request) -> ASGIApp:
        """Return the scores of pairs of texts."""
        said = await self.models.reader.read(request, rerank.parse_score)
        service = await self.models.serving(said.model, request)
        model, answer_id = service.model(said.model), new_request_id("score")
        name = service.model_name
        work = rerank.score(said, service.recipe, model, answer_id=answer_id, model_name=name)
        return self._collect(request, service, work, answer_id)

    def _collect(self, request: Request, service: Service, work: Work, answer_id: str) -> ASGIApp:
        return respond(service.live, work, names=names_of(request, answer_id))
