"""`options`: sampling parameters, and settings with which Ollama's own process loads and runs a model."""

from __future__ import annotations

from typing import Annotated, Any, cast

from pydantic import BeforeValidator, ConfigDict, Field

from pagewood.server.http.field_limits import MAX_STOPS, StopString
from pagewood.server.http.validation import WHOLE, describe_unused
from pagewood.server.protocols.common.sampling_fields import INT32_MAX, allowed
from pagewood.server.protocols.ollama.lenient import Lenient

IGNORED = frozenset(
    {
        "numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap",
        "use_mlock", "embedding_only", "num_thread",  # how Ollama's process runs a model
        "num_keep",  # tokens that a cut prompt keeps; prompts are never cut here
    }
)  # fmt: skip
"""Options that are about Ollama's process. They have no effect here, and the log does not mention them."""


def _known(value: Any) -> Any:
    """Return the options without those that are about Ollama's process."""
    if not isinstance(value, dict):
        return value
    return {name: one for name, one in cast("dict[str, Any]", value).items() if name not in IGNORED}


def _describe(schema: dict[str, Any]) -> None:
    describe_unused(schema, neutral={}, ignored=IGNORED)


class OllamaOptions(Lenient):
    """How tokens are chosen."""

    model_config = ConfigDict(json_schema_extra=_describe)

    temperature: Annotated[float, allowed("temperature")] | None = None
    top_k: Annotated[int, allowed("top_k", low=-1), WHOLE] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_p: Annotated[float, allowed("min_p")] | None = None
    typical_p: Annotated[float, allowed("typical_p")] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE] | None = None
    """Below 0: each request gets another seed."""
    num_predict: Annotated[int, Field(ge=-2, le=INT32_MAX), WHOLE] | None = None
    """At most 0: as many tokens as fit."""
    stop: Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    repeat_penalty: Annotated[float, allowed("repetition_penalty")] | None = None
    repeat_last_n: Annotated[int, WHOLE] | None = None
    """0: no penalties. Any other number: penalties count the whole text, as they always do here."""
    presence_penalty: Annotated[float, allowed("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, allowed("frequency_penalty")] | None = None
    num_ctx: Annotated[int, WHOLE] | None = None
    """Without effect: the longest text is that of the model."""

    def without_effect(self, *, max_length: int) -> list[str]:
        """Return the known options that have no effect here, for the log.

        Args:
            max_length: longest text of the model, in tokens.
        """
        found: list[str] = []
        if self.num_ctx is not None and self.num_ctx > max_length:
            found.append(f"options.num_ctx above {max_length}")
        if self.repeat_last_n is not None and self.repeat_last_n > 0:
            found.append("options.repeat_last_n above 0")
        return found


OptionsField = Annotated[OllamaOptions | None, BeforeValidator(_known)]
