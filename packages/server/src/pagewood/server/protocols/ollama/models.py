"""The JSON that describes models."""

from __future__ import annotations

from typing import Any

import msgspec

NEVER = "9999-12-31T23:59:59Z"


class ModelDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Data that Ollama reads from its own files; the HTTP process does not have it."""

    parent_model: str = ""
    format: str = "safetensors"
    family: str = ""
    families: tuple[str, ...] = ()
    parameter_size: str = ""
    quantization_level: str = ""


class ListedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that can be loaded."""

    name: str
    model: str
    modified_at: str
    """When the server started, ISO 8601."""
    size: int = 0
    """What it takes in memory, or would take, by the account of a server with several models; otherwise 0: unknown."""
    digest: str
    """Digest of the name, which alone distinguishes models here."""
    details: ModelDetails = ModelDetails()


class LoadedModel(ListedModel, frozen=True, kw_only=True):
    """A model that is loaded."""

    expires_at: str = NEVER
    """When it is unloaded unless a request comes before."""
    size_vram: int = 0
    """Always 0: unknown to the HTTP process."""
    context_length: int
    """Longest prompt plus output, in tokens."""


class ListedModels(msgspec.Struct, frozen=True):
    """All models."""

    models: tuple[ListedModel, ...]


class LoadedModels(msgspec.Struct, frozen=True):
    """The models that are loaded."""

    models: tuple[LoadedModel, ...]


class ShownModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model."""

    modelfile: str = ""
    parameters: str = ""
    template: str = ""
    details: ModelDetails = ModelDetails()
    model_info: dict[str, Any]
    """Its architecture, its name and, once it is loaded, its longest text in tokens."""
    capabilities: list[str]
    """`completion`, the sections that the response template reads (`tools`, `thinking`), and `vision` of a loaded model
    that takes images."""
    modified_at: str
    """When the server started, ISO 8601."""


class ApiVersion(msgspec.Struct, frozen=True):
    """The version of Ollama whose API this is."""

    version: str
