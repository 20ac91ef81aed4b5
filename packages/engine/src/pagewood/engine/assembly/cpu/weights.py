"""Reads new weights for a model on a CPU, in a thread of its own, and lets its runner compute with them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from pathlib import Path

from pagewood.engine.api import EngineConfig, Refusal
from pagewood.engine.assembly.cpu.rank import CPURank
from pagewood.engine.core.weights import ReadWeights
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.stored.updated_tensors import LooseFiles, MemoryFiles, UpdatedTensors, checksums
from pagewood.engine.runner.cpu.weights.loaded_model import LoadedModel
from pagewood.engine.runner.cpu.weights.matrix_memory import StoredMatrices, sleep_folder
from pagewood.engine.runner.trainer_groups import GroupError, TrainerGroups
from pagewood.engine.weight_commands import (
    CheckWeights,
    JoinGroup,
    LeaveGroup,
    Sleep,
    UpdateWeights,
    WakeUp,
    WeightCommand,
)
from pagewood.kvpool.system_pages import can_return_pages

_log = logging.getLogger(__name__)


class CPUWeights:
    """The weights of one process; satisfies `core.weights.WeightSource`.

    Tensors that have been replaced stay in their files, mapped, so that a later update may replace a part of them, and
    quantised weights are made from whole numbers every time: after any updates, they are those of a folder with the
    same tensors. While an update is read, there is memory for both.

    Args:
        folder: of the model.
        rank: has the model.
    """

    __slots__ = (
        "_are_dropped",
        "_folder",
        "_groups",
        "_next",
        "_parts",
        "_rank",
        "_reader",
        "_snapshot",
        "_stored",
        "_tensors",
    )

    def __init__(self, folder: Path, rank: CPURank) -> None:
        self._folder = folder
        self._rank = rank
        self._reader = ThreadPoolExecutor(1, "weight-reader")
        self._tensors: UpdatedTensors | None = None
        """What is computed with; None: the files of the folder."""  # written by: exchange
        self._groups = TrainerGroups()
        self._parts: UpdatedTensors | None = None
        """The model after the parts of an update so far; None: there is no part."""  # written by: the reader
        self._next: Callable[[], None] | None = None
        """What `exchange` does, because of what was read last."""  # written by: the reader, exchange
        self._stored: StoredMatrices | None = None
        """The weights while they sleep."""  # written by: exchange
        self._snapshot: tuple[dict[str, str], list[str]] | None = None
        """Checksums of tensors, and of matrices in memory."""  # written by: the reader
        self._are_dropped = False
        """Whether there are no weights before the next update."""  # written by: exchange

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
        if self._stored is not None:
            self._stored.close()

    def _change(self, tensors: UpdatedTensors, loaded: LoadedModel) -> None:
        self._rank.exchange(loaded)
        self._tensors = tensors
        self._are_dropped = False

    def _sleep(self, command: Sleep) -> Callable[[], None]:
        """Write what must not be lost to files; return what gives memory back.

        Raises:
            OSError: it cannot be written.
        """
        rank = self._rank
        memories = [rank.loaded.memory, rank.drafter_matrices] if "weights" in command.tags else []
        stored = StoredMatrices(memories) if memories and not command.drops_weights else None
        if stored is not None and self._tensors is not None:
            self._tensors = self._tensors.on_disk(sleep_folder())

        def give_back() -> None:
            self._stored = stored or self._stored
            if command.drops_weights:
                self._tensors = self._parts = None
                self._are_dropped = True
            for memory in memories:
                memory.give_back()
            if "kv_cache" in command.tags:
                rank.give_back_kv()

        return give_back

    def _wake(self, command: WakeUp) -> Callable[[], None]:
        """Read weights back; return what makes them usable.

        Raises:
            OSError: they cannot be read.
        """
        if "weights" in command.tags and self._stored is not None:
            self._stored.restore()

        def wake() -> None:
            if "weights" in command.tags and self._stored is not None:
                self._stored.close()
                self._stored = None
            if "kv_cache" in command.tags:
                self._rank.provide_kv()

        return wake

    def _check(self, command: CheckWeights) -> ReadWeights:
        """Return the checksum of all tensors, after they were noted or compared.

        Raises:
            ValueError: nothing was noted, or something differs.
        """
        own = self._tensors or self._of_folder(self._folder)
        now = checksums(own), self._rank.loaded.memory.checksums()
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
                self._next = self._wake(command)
                return ReadWeights(digest="")
            if isinstance(command, JoinGroup):
                self._groups.join(command, rank=self._rank.loaded.model.shard.rank)
                return ReadWeights(digest="")
            if isinstance(command, LeaveGroup):
                self._groups.leave(command.name)
                return ReadWeights(digest="")
            tensors = self._updated(command)
            lacking = tensors.lacking() if self._are_dropped and command.is_last and command.folder is None else []
            if lacking:
                raise ValueError(
                    f"an update must have all tensors after the weights were dropped, but {lacking[0]} and "
                    f"{len(lacking) - 1} others are missing"
                )
            self._parts = None if command.is_last else tensors
            if not command.is_last:
                return ReadWeights(digest="")
            self._next = partial(self._change, tensors, self._rank.load_again(tensors))
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
        return UpdatedTensors.of_folder(self._folder, folder, keeps_dtypes=self._rank.has_chosen_form)

    def _updated(self, command: UpdateWeights) -> UpdatedTensors:
        """Return the tensors of the model after an update.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: the files are not those of this model.
        """
        if command.folder is None:
            own = self._tensors or self._of_folder(self._folder)
            own = self._parts or own
            if command.group is not None:
                return own.with_files(MemoryFiles(self._groups.receive(command.group, command.received)))
            if command.files:
                return own.with_files(LooseFiles(map(Path, command.files)))
            if self._parts is None:
                raise ValueError("an update must have tensors, got none")
            return own
        folder = Path(command.folder)
        if (folder / "config.json").is_file() and ModelConfig.from_folder(folder) != ModelConfig.from_folder(
            self._folder
        ):
            raise ValueError(f"folder must hold a model with the configuration of {self._folder}, got {folder}")
        return self._of_folder(folder)


def why_fixed(config: EngineConfig) -> str | None:
    """Return why the weights of an engine on a CPU cannot be updated, or None."""
    refused: list[tuple[bool, str]] = [
        (config.max_adapters > 0, f"max_adapters is {config.max_adapters}"),
        (config.speculative in ("draft", "eagle"), f"speculative is {config.speculative}"),
        (config.pipeline_parallel_size > 1, f"pipeline_parallel_size is {config.pipeline_parallel_size}"),
        (config.nnodes > 1, f"nnodes is {config.nnodes}"),
        (config.enable_dp_attention, "enable_dp_attention is True"),
        (config.decision_log is not None, "decision_log does not keep when updates have been read"),
    ]
    return next((reason for is_so, reason in refused if is_so), None)


def why_awake(config: EngineConfig) -> str | None:
    """Return why an engine on a CPU cannot give memory back, or None."""
    if config.decision_log is not None:
        return "decision_log does not keep when memory is given back"
    if config.nnodes > 1:
        return f"nnodes is {config.nnodes}"
    return None if can_return_pages() else "the system is not Linux"
