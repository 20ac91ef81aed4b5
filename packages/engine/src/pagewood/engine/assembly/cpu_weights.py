"""Reads new weights for a model on a CPU, in a thread of its own, and lets its runner compute with them."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from pagewood.engine.api import EngineConfig, Refusal
from pagewood.engine.assembly.cpu_rank import CPURank
from pagewood.engine.core.weights import ReadWeights
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.stored.updated_tensors import LooseFiles, MemoryFiles, UpdatedTensors
from pagewood.engine.runner.cpu.weights.loaded_model import LoadedModel
from pagewood.engine.runner.trainer_groups import GroupError, TrainerGroups
from pagewood.engine.weight_commands import JoinGroup, LeaveGroup, UpdateWeights, WeightCommand

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

    __slots__ = ("_folder", "_groups", "_parts", "_rank", "_read", "_reader", "_tensors")

    def __init__(self, folder: Path, rank: CPURank) -> None:
        self._folder = folder
        self._rank = rank
        self._reader = ThreadPoolExecutor(1, "weight-reader")
        self._tensors: UpdatedTensors | None = None
        """What is computed with; None: the files of the folder."""  # written by: exchange
        self._groups = TrainerGroups()
        self._parts: UpdatedTensors | None = None
        """The model after the parts of an update so far; None: there is no part."""  # written by: the reader
        self._read: tuple[UpdatedTensors, LoadedModel] | None = None
        """What was read last, until it is computed with."""  # written by: the reader, exchange

    def read(self, command: WeightCommand) -> Future[ReadWeights | Refusal]:
        """Begin to read the weights of an update, or to join or leave a group."""
        return self._reader.submit(self._find, command)

    def exchange(self) -> str | None:
        """Compute later steps with the weights that were read last; return why not, or None."""
        assert self._read is not None
        (tensors, loaded), self._read = self._read, None
        try:
            self._rank.exchange(loaded)
        except Exception as error:
            _log.exception("the weights could not be exchanged")
            return str(error) or type(error).__name__
        self._tensors = tensors
        return None

    def close(self) -> None:
        """Read no more weights."""
        self._reader.shutdown(cancel_futures=True)
        self._groups.close()

    def _find(self, command: WeightCommand) -> ReadWeights | Refusal:
        self._read = None
        try:
            if isinstance(command, JoinGroup):
                self._groups.join(command, rank=self._rank.loaded.model.shard.rank)
                return ReadWeights(digest="")
            if isinstance(command, LeaveGroup):
                self._groups.leave(command.name)
                return ReadWeights(digest="")
            tensors = self._updated(command)
            self._parts = None if command.is_last else tensors
            if not command.is_last:
                return ReadWeights(digest="")
            self._read = tensors, self._rank.load_again(tensors)
        except FileNotFoundError as error:
            return Refusal(message=str(error), code="weights_missing")
        except (ValueError, OSError) as error:
            return Refusal(message=str(error), code="weights_invalid")
        except GroupError as error:
            return Refusal(message=str(error), code="group_failed")
        except MemoryError:
            return Refusal(message="there is no memory left for the weights", code="weights_too_large")
        except Exception as error:  # the engine goes on with the old ones
            _log.exception("weights could not be read")
            return Refusal(message=f"the weights could not be read: {error!r}", code="weights_failed")
        return ReadWeights(digest=tensors.digest)

    def _updated(self, command: UpdateWeights) -> UpdatedTensors:
        """Return the tensors of the model after an update.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: the files are not those of this model.
        """
        if command.folder is None:
            own = self._tensors or UpdatedTensors.of_folder(self._folder, self._folder)
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
        return UpdatedTensors.of_folder(self._folder, folder)


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
