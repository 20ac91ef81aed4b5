"""Embeddings, rankings and scores over HTTP, with the echo model and its oracle, and with the real OpenAI client."""

from __future__ import annotations

import asyncio
import base64
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from openai import AsyncOpenAI

from memory_server import MAX_LENGTH, MemoryServer
from pagewood.engine import LLM
from pagewood.engine.api import PoolingParams
from pagewood.engine.model_folder.vector_recipe import HeadScoring, PairScoring, VectorRecipe, cosine
from pagewood.engine.testing import oracle_tokens, oracle_vector
from pagewood.engine.testing.echo import echo_logprob
from pagewood.engine.text import Tokenizer
from serving import MODEL, Server

EMBEDDINGS = "/v1/embeddings"
TEXTS = ["the first text", "the second, longer text", "bread and butter"]


def vector(tokenizer: Tokenizer, text: str | list[int], pooling: PoolingParams | None = None) -> NDArray[np.float32]:
    """Return what the oracle finds for a text."""
    tokens = tokenizer.encode(text).tolist() if isinstance(text, str) else text
    return oracle_vector(tokens, pooling or PoolingParams())


async def start(folder: Path, tokenizer: Tokenizer, recipe: VectorRecipe) -> MemoryServer:
    server = MemoryServer(folder, tokenizer, limit=64, recipe=recipe)
    await server.start()
    return server


@pytest.mark.anyio
async def test_vectors_in_ollamas_forms(model_folder: Path, tokenizer: Tokenizer) -> None:
    server = await start(model_folder, tokenizer, VectorRecipe(pooling=PoolingParams(kind="mean", normalize=False)))
    try:
        raw = [vector(tokenizer, text, PoolingParams(kind="mean", normalize=False)) for text in TEXTS]
        unit = [vector(tokenizer, text, PoolingParams(kind="mean", normalize=True)) for text in TEXTS]
        found = (await server.post("/api/embed", {"input": TEXTS, "options": {"temperature": 1}})).json()
        assert found.keys() == {"model", "embeddings", "total_duration", "load_duration", "prompt_eval_count"}
        np.testing.assert_allclose(found["embeddings"], unit, rtol=1e-6)
        assert found["prompt_eval_count"] == sum(len(tokenizer.encode(text)) for text in TEXTS)
        short = (await server.post("/api/embed", {"input": TEXTS[1], "dimensions": 3, "truncate": True})).json()
        np.testing.assert_allclose(short["embeddings"], [raw[1][:3] / np.linalg.norm(raw[1][:3])], rtol=1e-5)
        older = (await server.post("/api/embeddings", {"prompt": TEXTS[2], "model": "echo:latest"})).json()
        np.testing.assert_allclose(older["embedding"], raw[2], rtol=1e-6)
        empty: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
            ("/api/embed", {"input": ""}, {"embeddings": []}),
            ("/api/embed", {"input": []}, {"embeddings": []}),
            ("/api/embeddings", {"prompt": ""}, {"embedding": []}),
        ]
        for path, said, nothing in empty:
            assert (await server.post(path, said)).json().items() >= nothing.items()
        for path, body, words in (
            ("/api/embed", {"input": 5}, "'input': expected a string or an array of strings"),
            ("/api/embed", {"input": ["x", 5]}, "'input': expected a string or an array of strings"),
            ("/api/embed", {"input": "x", "dimensions": 10**6}, "dimensions"),
            ("/api/embed", {"input": ["x", "x" * 999], "truncate": False}, f"maximum context length is {MAX_LENGTH}"),
            ("/api/embeddings", {"prompt": "x" * 999}, f"maximum context length is {MAX_LENGTH}"),
            ("/api/embeddings", {"prompt": "x", "model": "llama"}, "does not exist"),
        ):
            refused = await server.post(path, body)
            assert refused.status_code == (404 if body.get("model") else 400), (path, body)
            assert refused.json().keys() == {"error"}
            assert words in refused.json()["error"]
    finally:
        await server.stop()


@pytest.mark.anyio
@pytest.mark.parametrize("end_token", [None, 256])
async def test_a_text_too_long_for_ollamas_embed_loses_its_end(
    model_folder: Path, tokenizer: Tokenizer, end_token: int | None
) -> None:
    recipe = VectorRecipe(prompts={"document": "doc: "}, default_prompt="document", end_token=end_token)
    server = await start(model_folder, tokenizer, recipe)
    try:
        for options in ({}, {"truncate": True}, {"truncate": None, "options": {"num_ctx": 10**6}, "unheard_of": 1}):
            said: dict[str, Any] = {"input": [TEXTS[0], "ab" * 999, TEXTS[1]], **options}
            found = (await server.post("/api/embed", said)).json()
            end = [] if end_token is None else [end_token]
            texts = [tokenizer.encode(f"doc: {text}").tolist() for text in said["input"]]
            expected = [[*tokens[: MAX_LENGTH - len(end)], *end] for tokens in texts]
            assert len(expected[1]) == MAX_LENGTH
            unit = [vector(tokenizer, tokens, PoolingParams(normalize=True)) for tokens in expected]
            np.testing.assert_allclose(found["embeddings"], unit, rtol=1e-6)
            assert found["prompt_eval_count"] == sum(map(len, expected))
    finally:
        await server.stop()


@pytest.mark.anyio
async def test_a_text_loses_its_end_if_the_client_says_where(model_folder: Path, tokenizer: Tokenizer) -> None:
    server = await start(model_folder, tokenizer, VectorRecipe(max_tokens=20))
    try:
        long = "ab" * 40
        for cut, kept in ((7, 7), (-1, 20), (10**6, 20)):
            said = {"input": [long, "ab"], "truncate_prompt_tokens": cut}
            found = (await server.post(EMBEDDINGS, said)).json()
            whole = tokenizer.encode(long).tolist()
            np.testing.assert_allclose(found["data"][0]["embedding"], vector(tokenizer, whole[:kept]), rtol=1e-6)
            np.testing.assert_allclose(found["data"][1]["embedding"], vector(tokenizer, "ab"), rtol=1e-6)
            assert found["usage"]["prompt_tokens"] == kept + len(tokenizer.encode("ab"))
            body = {"query": "ab", "documents": [long], "truncate_prompt_tokens": cut}
            ranked = (await server.post("/v1/rerank", body)).json()
            score = cosine(vector(tokenizer, "ab"), vector(tokenizer, whole[:kept]))
            assert ranked["results"][0]["relevance_score"] == pytest.approx(score, rel=1e-6)
        refused = await server.post(EMBEDDINGS, {"input": long})
        assert (refused.status_code, "maximum context length is 20" in refused.text) == (400, True)
        refused = await server.post(EMBEDDINGS, {"input": long, "truncate_prompt_tokens": 0})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "truncate_prompt_tokens")
    finally:
        await server.stop()


@pytest.mark.anyio
@pytest.mark.parametrize("is_probability", [True, False])
async def test_a_head_scores_both_texts_as_one(
    model_folder: Path, tokenizer: Tokenizer, *, is_probability: bool
) -> None:
    pooling = PoolingParams(kind="cls", normalize=False)
    recipe = VectorRecipe(scoring=HeadScoring(pooling=pooling, is_probability=is_probability), max_tokens=40)
    server = await start(model_folder, tokenizer, recipe)

    def score(query: str, document: str, longest: int | None = None) -> float:
        tokens = tokenizer.encode_pair(query, document, longest=longest).tolist()
        logit = float(vector(tokenizer, tokens, pooling)[0])
        return 1 / (1 + math.exp(-logit)) if is_probability else logit

    try:
        ranked = (await server.post("/v1/rerank", {"query": "one", "documents": TEXTS})).json()["results"]
        expected = [score("one", text) for text in TEXTS]
        assert [one["index"] for one in ranked] == sorted(range(3), key=lambda index: -expected[index])
        for one in ranked:
            assert one["relevance_score"] == pytest.approx(expected[int(one["index"])], rel=1e-6)
        scored = (await server.post("/v1/score", {"text_1": ["a", "b", "c"], "text_2": TEXTS})).json()["data"]
        for one, query, text in zip(scored, "abc", TEXTS, strict=True):
            assert one["score"] == pytest.approx(score(query, text), rel=1e-6)
        body = {"query": "q" * 30, "documents": ["d" * 50]}
        refused = await server.post("/v1/rerank", body)
        assert (refused.status_code, "maximum context length is 40" in refused.text) == (400, True)
        for cut, longest in ((-1, 40), (9, 9)):
            [one] = (await server.post("/v1/rerank", {**body, "truncate_prompt_tokens": cut})).json()["results"]
            assert one["relevance_score"] == pytest.approx(score("q" * 30, "d" * 50, longest), rel=1e-6)
        for path, said in (
            (EMBEDDINGS, {"input": "x"}), ("/api/embed", {"input": "x"}),
            ("/v1/rerank", {"query": "x", "documents": ["x"], "instruct": "y"}),
        ):  # fmt: skip
            refused = await server.post(path, said)
            assert refused.status_code == 400, path
    finally:
        await server.stop()


@pytest.mark.anyio
async def test_a_model_without_vectors_says_so_in_every_protocol(model_folder: Path, tokenizer: Tokenizer) -> None:
    async with MemoryServer(model_folder, tokenizer, limit=8, makes_vectors=False) as server:
        for path, body in (("/api/embed", {"input": "x"}), ("/api/embeddings", {"prompt": "x"})):
            refused = await server.post(path, body)
            assert (refused.status_code, refused.json().keys()) == (400, {"error"})
            assert "makes no vectors" in refused.json()["error"]
        refused = await server.post(EMBEDDINGS, {"input": "x"})
        assert refused.status_code == 400
        assert "makes no vectors" in refused.json()["error"]["message"]


@pytest.mark.anyio
async def test_every_form_of_input_has_its_vectors(server: MemoryServer) -> None:
    ids = [server.tokenizer.encode(text).tolist() for text in TEXTS]
    forms: list[tuple[Any, list[Any]]] = [(TEXTS[0], TEXTS[:1]), (TEXTS, TEXTS), (ids[0], ids[:1]), (ids, ids)]
    for given, several in forms:
        response = await server.post(EMBEDDINGS, {"input": given, "user": "someone"})
        body = response.json()
        assert response.status_code == 200
        assert (body["object"], body["model"]) == ("list", "echo")
        assert [one["index"] for one in body["data"]] == list(range(len(several)))
        for one, text in zip(body["data"], several, strict=True):
            assert one["object"] == "embedding"
            np.testing.assert_allclose(one["embedding"], vector(server.tokenizer, text), rtol=1e-6)
        num_tokens = sum(len(ids[i]) for i in range(len(several)))
        usage = body["usage"]
        assert (usage["prompt_tokens"], usage["total_tokens"]) == (num_tokens, num_tokens)
        assert usage["prompt_tokens_details"]["cached_tokens"] <= num_tokens


@pytest.mark.anyio
async def test_base64_holds_the_bytes_of_the_numbers_and_dimensions_cut_before_the_norm(server: MemoryServer) -> None:
    body = {"input": TEXTS[0], "dimensions": 3}
    numbers = (await server.post(EMBEDDINGS, body)).json()["data"][0]["embedding"]
    text = (await server.post(EMBEDDINGS, {**body, "encoding_format": "base64"})).json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == numbers
    np.testing.assert_allclose(numbers, vector(server.tokenizer, TEXTS[0], PoolingParams(dimensions=3)), rtol=1e-6)
    assert math.isclose(float(np.linalg.norm(numbers)), 1.0, rel_tol=1e-6)


@pytest.mark.anyio
async def test_the_client_of_openai_reads_vectors(server: MemoryServer) -> None:
    over: Any = server.client
    client = AsyncOpenAI(base_url="http://memory/v1", api_key="none", http_client=over, max_retries=0)
    found = await client.embeddings.create(model="echo", input=TEXTS)
    for one, text in zip(found.data, TEXTS, strict=True):
        np.testing.assert_allclose(one.embedding, vector(server.tokenizer, text), rtol=1e-6)
    assert found.usage.prompt_tokens == sum(len(server.tokenizer.encode(text)) for text in TEXTS)


@pytest.mark.anyio
async def test_the_recipe_of_the_folder_decides(model_folder: Path, tokenizer: Tokenizer) -> None:
    pooling = PoolingParams(kind="mean", normalize=False)
    recipe = VectorRecipe(
        pooling=pooling, prompts={"query": "Q: ", "other": "O: "}, default_prompt="other", max_tokens=20, end_token=9
    )
    server = await start(model_folder, tokenizer, recipe)
    for fields, prompt in (({}, "O: "), ({"prompt_name": "query"}, "Q: ")):
        body = (await server.post(EMBEDDINGS, {"input": "text", **fields})).json()
        tokens = [*tokenizer.encode(f"{prompt}text").tolist(), 9]
        np.testing.assert_allclose(body["data"][0]["embedding"], vector(tokenizer, tokens, pooling), rtol=1e-6)
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    for given in ("x" * 17, [5] * 21, "x" * 200):
        error = (await server.post(EMBEDDINGS, {"input": given})).json()["error"]
        assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
        assert error["message"].startswith("This model's maximum context length is 20 tokens, but the prompt has")
    error = (await server.post(EMBEDDINGS, {"input": "x", "prompt_name": "nope"})).json()["error"]
    assert (error["param"], "query, other" in error["message"]) == ("prompt_name", True)
    await server.until_idle()
    await server.stop()


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_documents_are_ranked_by_the_cosine_of_vectors(server: MemoryServer, path: str) -> None:
    query = "a query"
    scores = [cosine(vector(server.tokenizer, query), vector(server.tokenizer, text)) for text in TEXTS]
    order = sorted(range(len(TEXTS)), key=lambda i: -scores[i])
    given = [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]
    body = (await server.post(path, {"query": query, "documents": given, "return_documents": True})).json()
    assert [one["index"] for one in body["results"]] == order
    np.testing.assert_allclose([one["relevance_score"] for one in body["results"]], [scores[i] for i in order], 1e-5)
    assert [one["document"] for one in body["results"]] == [{"text": TEXTS[i]} for i in order]
    assert (body["model"], body["id"].startswith("rerank-")) == ("echo", True)
    lengths = [len(server.tokenizer.encode(text)) for text in [query, *TEXTS]]
    assert body["usage"]["total_tokens"] == sum(lengths)
    best = (await server.post(path, {"query": query, "documents": given, "top_n": 1})).json()["results"]
    assert best == [{key: body["results"][0][key] for key in ("index", "relevance_score")}]


@pytest.mark.anyio
async def test_pairs_are_scored(server: MemoryServer) -> None:
    for first, second in ((TEXTS[0], TEXTS[1]), (TEXTS[0], TEXTS), (TEXTS, TEXTS[::-1])):
        body = (await server.post("/v1/score", {"text_1": first, "text_2": second})).json()
        others = [second] if isinstance(second, str) else second
        queries = [first] * len(others) if isinstance(first, str) else first
        expected = [
            cosine(vector(server.tokenizer, a), vector(server.tokenizer, b))
            for a, b in zip(queries, others, strict=True)
        ]
        assert body["object"] == "list"
        assert [one["index"] for one in body["data"]] == list(range(len(others)))
        np.testing.assert_allclose([one["score"] for one in body["data"]], expected, rtol=1e-5)


@pytest.mark.anyio
async def test_a_reranker_is_asked_about_every_pair(model_folder: Path, tokenizer: Tokenizer) -> None:
    """The echo model knows nothing of biases; the score is the probability that it makes up for the token."""
    scoring = PairScoring(true_token=1, false_token=2)

    def reported(text: str) -> dict[int, float]:
        tokens = tokenizer.encode(text).tolist()
        found = oracle_tokens(
            tokens, scoring.sampling, vocab_size=tokenizer.vocab_size, stop_ids=frozenset(), max_length=MAX_LENGTH
        )
        return dict(echo_logprob(found[0], len(tokens), 2).top)

    documents = ["x", "y"]
    texts = [scoring.text("q", document, instruction="judge") for document in documents]
    scoring = PairScoring(true_token=max(reported(texts[1])), false_token=2)
    expected = [math.exp(reported(text).get(scoring.true_token, -math.inf)) for text in texts]
    assert expected[0] == 0.0 < expected[1]
    server = await start(model_folder, tokenizer, VectorRecipe(scoring=scoring))
    fields = {"query": "q", "documents": documents, "instruct": "judge"}
    body = (await server.post("/v1/rerank", fields)).json()
    assert [(one["index"], pytest.approx(one["relevance_score"])) for one in body["results"]] == [
        (1, expected[1]), (0, expected[0]),
    ]  # fmt: skip
    assert body["usage"]["total_tokens"] == sum(len(tokenizer.encode(text)) for text in texts)
    fields = {"text_1": "q", "text_2": documents, "instruct": "judge"}
    scores = [one["score"] for one in (await server.post("/v1/score", fields)).json()["data"]]
    assert scores == pytest.approx(expected)
    await server.until_idle()
    await server.stop()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        (EMBEDDINGS, {"input": []}, "input", "expected a string, or a non-empty array"),
        (EMBEDDINGS, {"input": ""}, "input", "at least one token"),
        (EMBEDDINGS, {"input": [5, 999]}, "input", "token ids must be in [0, 258)"),
        (EMBEDDINGS, {"input": ["a", [5]]}, "input", "expected an array of strings, of token ids"),
        (EMBEDDINGS, {"input": "a", "dimensions": 0}, "dimensions", "a value >= 1"),
        (EMBEDDINGS, {"input": "a", "dimensions": 5}, "dimensions", "dimensions must be in [1, 4], got 5"),
        (EMBEDDINGS, {"input": "a", "encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
        (EMBEDDINGS, {"input": "a", "stream": True}, "stream", "Unrecognized request argument"),
        (EMBEDDINGS, {"input": "a", "prompt_name": "q"}, "prompt_name", "this model has no prompts"),
        (EMBEDDINGS, {"input": "a" * (MAX_LENGTH + 1)}, "input", "maximum context length is"),
        (EMBEDDINGS, {"input": ["a"] * 65}, "input", "expected at most 64 prompts"),
        (EMBEDDINGS, {}, "input", "Missing required parameter"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents", "a non-empty array"),
        ("/v1/rerank", {"query": "a", "documents": [5]}, "documents", "but got an integer among them"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n", "a value >= 1"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "instruct": "c"}, "instruct", "is for rerankers"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_1", "expected 1 text or 1, as in 'text_2'"),
        ("/v1/score", {"text_1": "a", "text_2": 5}, "text_2", "a string or a non-empty array of strings"),
    ],
)
async def test_a_wrong_request_gets_an_error(
    server: MemoryServer, path: str, fields: dict[str, Any], param: str, message: str
) -> None:
    response = await server.post(path, fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert message in error["message"]


@pytest.mark.anyio
async def test_a_client_that_leaves_ends_its_requests(server: MemoryServer) -> None:
    server.gate.close()
    asking = asyncio.create_task(server.post(EMBEDDINGS, {"input": TEXTS}))
    await server.until(lambda: server.service.live.num_live == len(TEXTS))
    asking.cancel()
    await server.until(lambda: server.service.live.num_live == 0)
    server.gate.open()
    await server.until_idle()


def test_a_real_server_makes_the_vectors_of_the_offline_api(tmp_path: Path) -> None:
    with LLM(max_total_tokens=1024) as llm:
        expected, ranked = llm.embed(TEXTS), llm.rerank("text", TEXTS)
    server = Server(tmp_path, "--max-total-tokens", "4096")
    try:
        server.until_idle()
        found = server.openai.embeddings.create(model=MODEL, input=TEXTS)
        assert [one.embedding for one in found.data] == expected.tolist()
        short = server.openai.embeddings.create(model=MODEL, input=TEXTS[0], dimensions=8, encoding_format="float")
        cut = expected[0][:8] / np.linalg.norm(expected[0][:8])
        np.testing.assert_allclose(short.data[0].embedding, cut, atol=1e-6)
        body = server.http.post("/v1/rerank", json={"model": MODEL, "query": "text", "documents": TEXTS}).json()
        assert [(one["index"], one["relevance_score"]) for one in body["results"]] == [
            (one.index, pytest.approx(one.score)) for one in ranked
        ]
        pairs = server.http.post("/v1/score", json={"model": MODEL, "text_1": TEXTS[0], "text_2": TEXTS}).json()
        assert pairs["data"][0]["score"] == pytest.approx(1.0)
    finally:
        server.close()
