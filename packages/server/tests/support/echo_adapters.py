"""Adapters of the echo model: folders whose tensors are a number in a file, and the tokens that activate it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pagewood.engine.api import Refusal
from pagewood.engine.core.adapter import LoadedAdapter


def write_echo_adapter(folder: Path, content: int, invocation: Sequence[int] = ()) -> None:
    """Write an adapter that is made of a number, and active from the last of these tokens on, if there are any."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_text(" ".join(map(str, (content, *invocation))))


class _Loaded:
    """A folder that has been read."""

    def __init__(self, found: LoadedAdapter | Refusal) -> None:
        self._found = found

    def done(self) -> bool:
        """It is done."""
        return True

    def result(self) -> LoadedAdapter | Refusal:
        """Return the adapter, or why there is none."""
        return self._found


class EchoAdapters:
    """Reads such folders; satisfies `core.memory.adapters.AdapterSource`."""

    def __init__(self) -> None:
        self.contents: dict[int, int] = {}
        """By number of the engine."""  # contents written by: keep

    def load(self, folder: str) -> _Loaded:
        """Read a folder."""
        text = (Path(folder) / "adapter_model.safetensors").read_text()
        if not text.replace(" ", "").isdecimal():
            refusal = Refusal(message=f"{folder} must hold a number, got {text!r}", code="adapter_invalid")
            return _Loaded(refusal)
        content, *invocation = map(int, text.split())
        return _Loaded(LoadedAdapter(version=text, weights=content, invocation=tuple(invocation)))

    def keep(self, number: int, weights: object) -> None:
        """Keep what an adapter is made of."""
        assert isinstance(weights, int)
        self.contents[number] = weights

    def forget_unused(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
