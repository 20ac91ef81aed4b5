"""Backends and vocabularies, made once."""

from __future__ import annotations

import pytest

from grammars.libraries import llguidance_for
from grammars.vocabularies import Vocabulary, embedded, trained
from pagewood.engine.grammar import Backend


@pytest.fixture(scope="session", params=["embedded", "trained"])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return embedded() if request.param == "embedded" else trained(32_768, 5)


@pytest.fixture(scope="session")
def backend(vocabulary: Vocabulary) -> Backend:
    return llguidance_for(vocabulary)
