"""Weights of the echo model: folders and files that hold a number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pagewood.engine.api import Refusal
from pagewood.engine.core.weights import ReadWeights
from pagewood.engine.testing import EchoRunner
from pagewood.engine.weight_commands import CheckWeights, DropUpdate, JoinGroup, Sleep, UpdateWeights, WeightCommand

WHOLE = "whole"
"""A tensor of this name from a group stands for all that there are; others are counted."""


def write_echo_weights(folder: Path, content: str) -> Path:
    """Write weights that are a number, as a folder of a model; return the file. A part of a model is written "+5"."""
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
    """Reads such folders; satisfies `core.weights.WeightSource`.

    Args:
        runner: whose weights they are.
        fault: returns why a command fails here, or nothing; None: none does. The end of an update is "exchange".
    """

    def __init__(
        self, runner: Callable[[], EchoRunner], *, fault: Callable[[WeightCommand | str], str] | None = None
    ) -> None:
        self._runner = runner
        self._fault = fault
        self._content = 0
        self._parts: int | None = None
        """The content after the parts of an update so far."""
        self._next: int | None = None
        """The content after the update that was read last."""
        self._forgets = False

    def read(self, command: WeightCommand) -> _Read:
        """Read a folder or a file, or note a group and the number of tensors that come from it."""
        self._next = None
        if self._fault is not None and (message := self._fault(command)):
            return _Read(Refusal(message=message, code="weights_invalid"))
        if isinstance(command, JoinGroup) and command.backend != "gloo":
            return _Read(Refusal(message="backend must be gloo, got nccl", code="weights_invalid"))
        self._forgets = isinstance(command, Sleep) and "kv_cache" in command.tags
        if isinstance(command, CheckWeights):
            return _Read(ReadWeights(digest=f"sum {self._content}"))
        if isinstance(command, DropUpdate):
            self._parts = None
        if not isinstance(command, UpdateWeights):
            return _Read(ReadWeights(digest=""))
        try:
            found = self._read(command)
        except ValueError as error:
            return _Read(Refusal(message=str(error), code="weights_invalid"))
        self._parts = None if command.is_last else found
        self._next = found if command.is_last else None
        return _Read(ReadWeights(digest=str(found)))

    def _read(self, command: UpdateWeights) -> int:
        base = self._content if self._parts is None else self._parts
        is_whole = any(one.name == WHOLE for one in command.received)
        if command.folder is not None or command.files:
            place = Path(command.folder or command.files[0])
            text = (place / "model.safetensors" if command.folder else place).read_text()
            if not text.removeprefix("+").isdecimal():
                raise ValueError(f"weights must be a number, got {text!r}")
            is_whole, number = not text.startswith("+"), int(text)
        elif command.group is None and self._parts is None:
            raise ValueError("an update must have tensors, got none")
        else:
            number = len(command.received)
        if command.is_whole and not is_whole and self._parts is None:
            raise ValueError("an update must have all tensors")
        return number if is_whole else base + number

    def exchange(self) -> str | None:
        """Let the model be made of the number."""
        if self._next is not None:
            if self._fault is not None and (message := self._fault("exchange")):
                return message
            self._content, self._next = self._next, None
        self._runner().weights = self._content  # not ours
        if self._forgets:
            self._runner().forget_kv()
        return None

    def close(self) -> None:
        """Do nothing."""
