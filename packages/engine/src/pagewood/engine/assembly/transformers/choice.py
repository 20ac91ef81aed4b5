"""Which models are computed by `transformers` instead of the parts of this package, and why."""

# pyright: basic
# transformers is typed in part only.

from __future__ import annotations

import importlib.util
from typing import Any

from pagewood.engine.api import EngineConfig
from pagewood.engine.json_fields import Fields
from pagewood.engine.model_folder.folder import model_folder
from pagewood.engine.models.families.registry import FAMILIES


def reason_for_transformers(config: EngineConfig) -> str | None:
    """Return why the model of a configuration is computed by `transformers`; None: it is not.

    Raises:
        ValueError: the library is wanted and not installed, or the model is a GGUF file, which this package reads.
        FileNotFoundError: the model does not exist.
    """
    if config.model_impl == "native":
        return None
    is_installed = importlib.util.find_spec("transformers") is not None
    if config.model_impl == "transformers":
        if not is_installed:
            raise ValueError("model_impl transformers needs it: pip install 'pagewood-engine[transformers]'")
        return "model_impl is transformers"
    path = model_folder(config.model) / "config.json"
    if not path.is_file():
        return None
    fields = Fields.from_file(path)
    names = fields.texts("architectures") or ()
    if not is_installed or not names:
        return None
    found = next((name for name in names if name in FAMILIES), None)
    if found is None:
        return f"there is no table for {names[0]}" if _is_known(fields, names[0]) else None
    other = next((field for field in FAMILIES[found].computed_elsewhere if fields.values.get(field)), None)
    if other is None or not _is_known(fields, found):
        return None
    return f"{found} with {other} {fields.values[other]} is computed there only"


def _is_known(fields: Fields, name: str) -> bool:
    """Return whether `transformers` has a causal model of this name."""
    from transformers.models.auto import modeling_auto  # takes a second

    known: Any = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(fields.text("model_type", ""), ())
    return name == known or name in (known if isinstance(known, tuple) else ())
