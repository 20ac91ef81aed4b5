"""Continuous batching for language models, from parts that can be used alone.

`LLM` and `AsyncLLM` are loaded on first use, because an engine imports torch; the engine's core needs only numpy.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pagewood.engine.api import EngineConfig, FinishReason, Grammar, PoolingParams, SamplingParams, TokenLogprob
from pagewood.engine.beam_search import BeamSearchParams

if TYPE_CHECKING:
    from pagewood.engine.offline.async_llm import AsyncLLM
    from pagewood.engine.offline.beam_search import BeamSearchResult, BeamSequence
    from pagewood.engine.offline.calls import (
        Completion,
        EngineFailedError,
        LLMAsleepError,
        LLMBusyError,
        LLMClosedError,
    )
    from pagewood.engine.offline.llm import LLM
    from pagewood.engine.offline.vectors import RankedDocument

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "BeamSearchResult",
    "BeamSequence",
    "Completion",
    "EngineConfig",
    "EngineFailedError",
    "FinishReason",
    "Grammar",
    "LLMAsleepError",
    "LLMBusyError",
    "LLMClosedError",
    "PoolingParams",
    "RankedDocument",
    "SamplingParams",
    "TokenLogprob",
    "__version__",
]

_MODULES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "BeamSearchResult": "beam_search",
    "BeamSequence": "beam_search",
    "Completion": "calls",
    "EngineFailedError": "calls",
    "LLMAsleepError": "calls",
    "LLMBusyError": "calls",
    "LLMClosedError": "calls",
    "RankedDocument": "vectors",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.offline.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
