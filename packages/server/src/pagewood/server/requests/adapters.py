"""The adapters that clients may name, as the HTTP process knows them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pagewood.server.http.errors import ApiError

NAME = re.compile(r"[A-Za-z0-9._@/+-]{1,128}")
"""Names of adapters: without a colon, which stands between the model and an adapter, or a comma, as in metrics."""
_FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAdapter:
    """A loaded adapter."""

    name: str
    folder: str
    created: int
    """Unix time, seconds."""


@dataclass(slots=True, kw_only=True)
class ServedAdapters:
    """The loaded adapters. Invariant: the next engine process begins with those that this one has."""

    folders: Sequence[Path] = ()
    """Adapters from a request must lie below one of these."""
    clock: Callable[[], float] = time.time
    by_name: dict[str, ServedAdapter] = field(default_factory=dict[str, ServedAdapter])
    """In the order in which they were loaded."""  # written by: adapters

    @classmethod
    def of(cls, loaded: Iterable[tuple[str, str]], folders: Sequence[Path]) -> ServedAdapters:
        """Return the adapters that a server has from its start: names and folders."""
        own = cls(folders=folders)
        for name, folder in loaded:
            own.note(name, folder)
        return own

    def note(self, name: str, folder: str) -> None:
        """Note that an adapter was loaded, in place of one of that name."""
        self.by_name[name] = ServedAdapter(name=name, folder=folder, created=int(self.clock()))

    def forget(self, name: str) -> None:
        """Note that an adapter was unloaded."""
        self.by_name.pop(name, None)

    def loaded(self) -> tuple[tuple[str, str], ...]:
        """Return names and folders of those whose files are still there."""
        return tuple(
            (one.name, one.folder)
            for one in self.by_name.values()
            if all((Path(one.folder) / file).is_file() for file in _FILES)
        )

    def checked_folder(self, folder: str, *, param: str) -> str:
        """Return the folder that a request names, without links.

        Raises:
            ApiError: the operator allows no such folder, or there is none. Which of both it is cannot be seen from
                outside of the allowed folders.
        """
        if not self.folders:
            raise ApiError(
                "This server loads no adapters by request; start it with --adapter-folder.",
                param=param,
                code="adapters_not_allowed",
            )
        found = self._allowed(folder)
        if found is None:
            raise ApiError(
                f"No adapter lies in '{folder}', or it is not below a folder of --adapter-folder.",
                status=404,
                param=param,
                code="adapter_missing",
            )
        return str(found)

    def _allowed(self, folder: str) -> Path | None:
        """Return the folder of an adapter without links; None: it is not allowed, or not there."""
        try:
            found = Path(folder).resolve()
            files = [(found / file).resolve() for file in _FILES]
            roots = [root.resolve() for root in self.folders]
            if not any(all(place.is_relative_to(root) for place in (found, *files)) for root in roots):
                return None
            return found if all(file.is_file() for file in files) else None
        except (OSError, ValueError, RuntimeError):  # a name that no file can have, or a loop of links
            return None


def check_name(name: str, *, model_name: str, param: str) -> None:
    """Check the name of an adapter that is to be loaded.

    Raises:
        ApiError: it cannot be the name of an adapter.
    """
    if not NAME.fullmatch(name) or name == model_name:
        raise ApiError(
            f"Invalid value for '{param}': expected 1 to 128 letters, digits or characters of ._@/+- that are not the "
            f"name of the model, but got '{name}' instead.",
            param=param,
            code="invalid_value",
        )
