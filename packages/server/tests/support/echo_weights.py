"""Weights of the echo model: folders and files that hold a number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pagewood.engine.api import Refusal
from pagewood.engine.core.weights import ReadWeights
from pagewood.engine.testing import EchoRunner
from pagewood.engine.weight_commands import CheckWeights, JoinGroup, Sleep, UpdateWeights, WeightCommand


def write_echo_weights(folder: Path, content: str) -> Path:
    """Write weights that are a number, as a folder of a model; return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "model.safetensors"
    file.write_text(content)
    return file


class _Read:
    """Weights that have been read."""

    def __init__(self, found: ReadWeights | Refusal) -> None:
        self._found = found

    def done(self) -> bool:
        """They are read."""
        return True

    def result(self) -> ReadWeights | Refusal:
        """Return what is known of them, or why there are none."""
        return self._found


class EchoWeights:
    """Reads such folders; satisfies `core.weights.WeightSource`."""

    def __init__(self, runner: Callable[[], EchoRunner]) -> None:
        self._runner = runner
        self._content = 0
        self._num_received = 0
        self._forgets = False

    def read(self, command: WeightCommand) -> _Read:
        """Read a folder or a file, or note a group and the number of tensors that come from it."""
        if isinstance(command, JoinGroup) and command.backend != "gloo":
            return _Read(Refusal(message="backend must be gloo, got nccl", code="weights_invalid"))
        self._forgets = isinstance(command, Sleep) and "kv_cache" in command.tags
        if isinstance(command, CheckWeights):
            return _Read(ReadWeights(digest=f"sum {self._content}"))
        if not isinstance(command, UpdateWeights):
            return _Read(ReadWeights(digest=""))
        if command.group is not None or not (command.folder or command.files):
            self._num_received += len(command.received)
            self._content = self._num_received
            return _Read(ReadWeights(digest=str(self._content)))
        place = Path(command.folder or command.files[0])
        text = (place / "model.safetensors" if command.folder else place).read_text()
        if not text.isdecimal():
            return _Read(Refusal(message=f"weights must be a number, got {text!r}", code="weights_invalid"))
        self._content = int(text)
        return _Read(ReadWeights(digest=text))

    def exchange(self) -> str | None:
        """Let the model be made of the number."""
        self._runner().weights = self._content  # not ours
        if self._forgets:
            self._runner().forget_kv()
        return None

    def close(self) -> None:
        """Do nothing."""
