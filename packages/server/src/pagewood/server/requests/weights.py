"""The weights that are served, as the HTTP process knows them, and the files from which admins may update them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pagewood.engine.weight_spans import FIRST_VERSION
from pagewood.server.http.errors import ApiError
from pagewood.server.messages import wire


def num_ranks(model: wire.Model | None) -> int:
    """Return the processes of an engine that join the group of a trainer."""
    config = {} if model is None else model.config
    return config.get("tensor_parallel_size", 1) * config.get("pipeline_parallel_size", 1)


@dataclass(slots=True, kw_only=True)
class ServedVersion:
    """The version of the weights. Invariant: a new engine process begins with the weights of the model's folder."""

    folders: Sequence[Path] = ()
    """Files of updates must lie below one of these."""
    version: str = ""  # written by: weights
    """Version of the engine process `incarnation`; empty: it was not updated."""
    incarnation: int = 0  # written by: weights

    def now(self, incarnation: int) -> str:
        """Return the version that the present engine process computes with."""
        return (self.version if self.incarnation == incarnation else "") or FIRST_VERSION

    def note(self, version: str, *, incarnation: int) -> None:
        """Note that an engine process computes with another version."""
        self.version, self.incarnation = version, incarnation

    def checked(self, name: str, *, param: str, is_folder: bool) -> str:
        """Return a path that a request names, without links.

        Args:
            name: of a folder with config.json, or of a file of safetensors.
            param: the client's name of the field.
            is_folder: which of both it must be.

        Raises:
            ApiError: the operator allows no such path, or there is nothing. Which of both it is cannot be seen from
                outside of the allowed folders.
        """
        if not self.folders:
            raise ApiError(
                "This server updates no weights by request; start it with --update-folder.",
                param=param,
                code="updates_not_allowed",
            )
        found = self._allowed(name, is_folder=is_folder)
        if found is None:
            kind = "model" if is_folder else "file of safetensors"
            raise ApiError(
                f"No {kind} lies in '{name[:200]}', or it is not below a folder of --update-folder.",
                status=404,
                param=param,
                code="weights_missing",
            )
        return str(found)

    def _allowed(self, name: str, *, is_folder: bool) -> Path | None:
        try:
            found = Path(name).resolve()
            files = [one.resolve() for one in found.glob("*.safetensors")] if is_folder else [found]
            roots = [root.resolve() for root in self.folders]
            if not any(all(place.is_relative_to(root) for place in (found, *files)) for root in roots):
                return None
            is_there = found.is_dir() if is_folder else found.suffix == ".safetensors" and found.is_file()
            return found if is_there else None
        except (OSError, ValueError, RuntimeError):  # a name that no file can have, or a loop of links
            return None
