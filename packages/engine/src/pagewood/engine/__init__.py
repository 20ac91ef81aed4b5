"""Continuous batching for language models, from parts that can be used alone.

`LLM` is the offline API and loads on first use, because it brings torch; the core of the engine needs only numpy.
"""

from typing import TYPE_CHECKING, Any

from pagewood.engine.api import EngineConfig, FinishReason, SamplingParams

if TYPE_CHECKING:
    from pagewood.engine.llm import LLM, Completion

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "EngineConfig", "FinishReason", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("LLM", "Completion"):
        from pagewood.engine import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
