"""Reads new weights for a model, or a rank's part of one, beside its steps, and lets its runner compute with them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from pagewood.engine.api import Refusal
from pagewood.engine.cache_folder import sleep_folder
from pagewood.engine.core.weights import ReadWeights
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.stored.tensor_files import SafetensorsFiles, TensorFiles
from pagewood.engine.models.stored.updated_tensors import MemoryFiles, UpdatedTensors, checksums
from pagewood.engine.runner.trainer_groups import GroupError, TrainerGroups
from pagewood.engine.weight_commands import (
    CheckWeights,
    DropUpdate,
    JoinGroup,
    LeaveGroup,
    Sleep,
    UpdateWeights,
    WakeUp,
    WeightCommand,
)

_log = logging.getLogger(__name__)


class ModelPart(Protocol):
    """The weights and the KV memory of a process, on its device.

    Methods read, or keep what must not be lost, and return what changes both, which is called when no step is in
    flight. They raise a ValueError if tensors are not those of the model, and an OSError if files cannot be used.
    """

    @property
    def rank(self) -> int:
        """Number of the process among the ranks of the model."""
        ...

    @property
    def has_chosen_form(self) -> bool:
        """Whether the form of its weights does not depend on the dtypes in its files."""
        ...

    def load_again(self, files: TensorFiles) -> Callable[[], None]:
        """Read the model with the tensors of `files`, to be computed with."""
        ...

    def checksums(self) -> list[str]:
        """Return digests of the matrices in memory."""
        ...

    def sleep(self, command: Sleep) -> Callable[[], None]:
        """Prepare to give memory back."""
        ...

    def wake(self, command: WakeUp) -> Callable[[], None]:
        """Prepare to take it again."""
        ...

    def close(self) -> None:
        """Forget what was kept."""
        ...


class ModelWeights:
    """The weights of one process; satisfies `core.weights.WeightSource`.

    Tensors that have been replaced stay in their files, mapped, so that a later update may replace a part of them, and
    quantised weights are made from whole numbers every time: after any updates, they are those of a folder with the
    same tensors. While an update is read, there is memory for both.

    Args:
        folder: of the model.
        part: this process's.
        groups: of trainers, in which it may be.
    """

    __slots__ = (
        "_are_dropped", "_folder", "_groups", "_next", "_part", "_parts", "_reader", "_snapshot", "_tensors",
    )  # fmt: skip

    def __init__(self, folder: Path, part: ModelPart, *, groups: TrainerGroups | None = None) -> None:
        self._folder = folder
        self._part = part
        self._reader = ThreadPoolExecutor(1, "weight-reader")
        self._tensors: UpdatedTensors | None = None
        """What is computed with; None: the files of the folder."""  # written by: the reader, exchange
        self._groups = groups or TrainerGroups()
        self._parts: UpdatedTensors | None = None
        """The model after the parts of an update so far; None: there is no part."""  # written by: the reader
        self._next: Callable[[], None] | None = None
        """What `exchange` does, because of what was read last."""  # written by: the reader, exchange
        self._snapshot: tuple[dict[str, str], list[str]] | None = None
        """Checksums of tensors, and of matrices in memory."""  # written by: the reader
        self._are_dropped = False
        """Whether there are no weights before the next update."""  # written by: exchange

    @property
    def files(self) -> TensorFiles | None:
        """The tensors that are computed with; None: those of the folder. From any thread."""
        return self._tensors

    def read(self, command: WeightCommand) -> Future[ReadWeights | Refusal]:
        """Begin to read the weights of an update, or to join or leave a group."""
        return self._reader.submit(self._find, command)

    def exchange(self) -> str | None:
        """Compute later steps with the weights that were read last; return why not, or None."""
        assert self._next is not None
        change, self._next = self._next, None
        try:
            change()
        except Exception as error:
            _log.exception("the weights could not be exchanged")
            return str(error) or type(error).__name__
        return None

    def close(self) -> None:
        """Read no more weights."""
        self._reader.shutdown(cancel_futures=True)
        self._groups.close()
        self._part.close()

    def _change(self, tensors: UpdatedTensors, change: Callable[[], None]) -> None:
        change()
        self._tensors = tensors
        self._are_dropped = False

    def _sleep(self, command: Sleep) -> Callable[[], None]:
        """Write what must not be lost to files; return what gives memory back.

        Raises:
            OSError: it cannot be written.
        """
        change = self._part.sleep(command)
        if "weights" in command.tags and not command.drops_weights and self._tensors is not None:
            self._tensors = self._tensors.on_disk(sleep_folder())

        def give_back() -> None:
            if command.drops_weights:
                self._tensors = self._parts = None
                self._are_dropped = True
            change()

        return give_back

    def _check(self, command: CheckWeights) -> ReadWeights:
        """Return the checksum of all tensors, after they were noted or compared.

        Raises:
            ValueError: nothing was noted, or something differs.
        """
        own = self._tensors or self._of_folder(self._folder)
        now = checksums(own), self._part.checksums()
        if command.action == "compare":
            if self._snapshot is None:
                raise ValueError("weights must be noted by a snapshot before they are compared")
            tensors, memory = self._snapshot
            others = sorted({name for name, _ in now[0].items() ^ tensors.items()})
            if others:
                names = ", ".join(others[:8])
                raise ValueError(f"{len(others)} tensors must be those of the snapshot, got others: {names}")
            if memory != now[1]:
                raise ValueError("memory of weights must be that of the snapshot, as all tensors are, got another")
        if command.action == "snapshot":
            self._snapshot = now
        total = sha256("".join(f"{name} {one}\n" for name, one in now[0].items()).encode())
        return ReadWeights(digest=total.hexdigest())

    def _find(self, command: WeightCommand) -> ReadWeights | Refusal:
        self._next = None
        try:
            if isinstance(command, CheckWeights):
                return self._check(command)
            if isinstance(command, Sleep):
                self._next = self._sleep(command)
                return ReadWeights(digest="")
            if isinstance(command, WakeUp):
                self._next = self._part.wake(command)
                return ReadWeights(digest="")
            if isinstance(command, DropUpdate):
                self._parts = None
                return ReadWeights(digest="")
            if isinstance(command, JoinGroup):
                self._groups.join(command, rank=self._part.rank)
                return ReadWeights(digest="")
            if isinstance(command, LeaveGroup):
                self._groups.leave(command.name)
                return ReadWeights(digest="")
            tensors = self._updated(command)
            is_whole = self._are_dropped or command.is_whole
            lacking = tensors.lacking() if is_whole and command.is_last and command.folder is None else []
            if lacking:
                raise ValueError(
                    "an update must have all tensors after the weights were dropped or lost, but "
                    f"{lacking[0]} and {len(lacking) - 1} others are missing"
                )
            self._parts = None if command.is_last else tensors
            if not command.is_last:
                return ReadWeights(digest="")
            self._next = partial(self._change, tensors, self._part.load_again(tensors))
        except FileNotFoundError as error:
            return Refusal(message=str(error), code="weights_missing")
        except (ValueError, OSError) as error:
            sleeps = isinstance(command, Sleep | WakeUp)
            return Refusal(message=str(error), code="sleep_failed" if sleeps else "weights_invalid")
        except GroupError as error:
            return Refusal(message=str(error), code="group_failed")
        except MemoryError:
            return Refusal(message="there is no memory left for the weights", code="weights_too_large")
        except Exception as error:  # the engine goes on with the old ones
            _log.exception("weights could not be read")
            return Refusal(message=f"the weights could not be read: {error!r}", code="weights_failed")
        return ReadWeights(digest=tensors.digest)

    def _of_folder(self, folder: Path) -> UpdatedTensors:
        """Return the tensors of the model from a folder."""
        return UpdatedTensors.of_folder(self._folder, folder, keeps_dtypes=self._part.has_chosen_form)

    def _updated(self, command: UpdateWeights) -> UpdatedTensors:
        """Return the tensors of the model after an update.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: the files are not those of this model.
        """
        if command.folder is None:
            before = None if command.is_whole else self._tensors
            own = self._parts or before or self._of_folder(self._folder)
            if command.group is not None:
                return own.with_files(MemoryFiles(self._groups.receive(command.group, command.received)))
            if command.files:
                return own.with_files(SafetensorsFiles.of_paths(map(Path, command.files)))
            if self._parts is None:
                raise ValueError("an update must have tensors, got none")
            return own
        folder = Path(command.folder)
        if (folder / "config.json").is_file() and ModelConfig.from_folder(folder) != ModelConfig.from_folder(
            self._folder
        ):
            raise ValueError(f"folder must hold a model with the configuration of {self._folder}, got {folder}")
        return self._of_folder(folder)
