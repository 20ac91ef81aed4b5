"""The names of a decoder's tensors in a checkpoint, where it may be a part of a larger model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Naming:
    """Prefixes of the names of tensors."""

    decoder: str
    """In place of "model."."""
    outside: str
    """Before other names, such as "lm_head.weight"."""

    @classmethod
    def of(cls, names: Collection[str]) -> Naming:
        """Return the naming of a checkpoint with tensors of these `names`.

        A decoder is saved with its output projection, inside a model that reads images too, or alone, without a prefix.
        """
        for decoder, outside in (("language_model.model.", "language_model."), ("model.language_model.", "")):
            if any(name.startswith(decoder) for name in names):
                return cls(decoder, outside)
        return cls("model.", "") if any(name.startswith("model.") for name in names) else cls("", "")

    def stored(self, name: str) -> str:
        """Return the name in the checkpoint of the tensor `name` of a standalone decoder."""
        if name.startswith("model."):
            return self.decoder + name.removeprefix("model.")
        return self.outside + name
