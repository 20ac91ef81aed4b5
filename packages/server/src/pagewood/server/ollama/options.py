"""`options`: how tokens are chosen, and what Ollama's own process would load and run a model with."""

from __future__ import annotations

from typing import Annotated, Any, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from pagewood.server.errors import ApiError
from pagewood.server.sampling import INT32_MAX, MAX_STOPS
from pagewood.server.validation import WHOLE, asks_for_nothing, describe_unused

IGNORED = frozenset(
    {
        "numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap",
        "use_mlock", "embedding_only", "num_thread",  # how Ollama's process runs a model
        "num_keep",  # what stays of a prompt that is cut; here none is cut
        "mirostat_tau", "mirostat_eta",  # of Mirostat, which is refused
    }
)  # fmt: skip
"""Options that have no effect on an answer here, whatever their value."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "mirostat": (None, 0),
    "tfs_z": (None, 1),
    "penalize_newline": (None, True),
}
"""Options that this server does not support -> the values that ask for nothing, which are accepted."""


def _known(value: Any) -> Any:
    """Return the options that have an effect.

    Raises:
        ValueError: an option that is not supported asks for something.
    """
    if not isinstance(value, dict):
        return value
    options = cast("dict[str, Any]", value)
    for name, neutral in NEUTRAL.items():
        if name in options and not asks_for_nothing(options[name], neutral):
            raise ValueError(f"the option '{name}' is not supported by this server; leave it out")
    return {name: value for name, value in options.items() if name not in IGNORED and name not in NEUTRAL}


def _describe(schema: dict[str, Any]) -> None:
    describe_unused(schema, neutral=NEUTRAL, ignored=IGNORED)


class OllamaOptions(BaseModel):
    """How tokens are chosen."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, json_schema_extra=_describe)

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX), WHOLE] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE] | None = None
    """Below 0: another one in each request."""
    num_predict: Annotated[int, Field(ge=-2, le=INT32_MAX), WHOLE] | None = None
    """At most 0: as many tokens as fit."""
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, le=0), WHOLE] | None = None
    """-1: penalties count the whole text, as they always do here. 0: there are none."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    num_ctx: Annotated[int, Field(ge=1, le=INT32_MAX), WHOLE] | None = None

    def check(self, *, max_length: int) -> None:
        """Check that the model's texts may be as long as the request wants.

        Raises:
            ApiError: they may not.
        """
        if self.num_ctx is not None and self.num_ctx > max_length:
            raise ApiError(
                f"Invalid value for 'options.num_ctx': expected at most the longest text of this model, {max_length} "
                f"tokens, but got {self.num_ctx} instead.",
                param="options.num_ctx",
                code="invalid_value",
            )


OptionsField = Annotated[OllamaOptions | None, BeforeValidator(_known)]
