"""The weights and the KV memory of a model on a device, as they change and sleep; and why those of an engine do not."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pagewood.engine.api import EngineConfig
from pagewood.engine.assembly.cuda.drafter import LoadedDrafter
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.models.stored.tensor_files import TensorFiles
from pagewood.engine.runner.cuda.device import Device
from pagewood.engine.runner.device_memory import DeviceMemory, checksums_of, replace_numbers, tensors_of
from pagewood.engine.weight_commands import Sleep, WakeUp

if TYPE_CHECKING:
    from pagewood.engine.assembly.cuda.build import BuiltRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWeights:
    """What has the weights of a runner on a device."""

    decoder: Decoder[Tensor]
    drafter: LoadedDrafter | None
    load_again: Callable[[TensorFiles], Decoder[Tensor]]
    """Returns the decoder on the host, with the tensors of other files."""
    outside: Collection[object]
    """What these use, and has no weights."""

    def tensors(self, files: TensorFiles | None = None) -> list[Tensor]:
        """Return what updates replace: of the model, and of a head from its own folder.

        With `files`, these are tensors on the host, in the same order, with the numbers of the files.

        Raises:
            ValueError: they are not those of the model.
        """
        drafter = self.drafter
        parts: list[Any] = [self.decoder if files is None else self.load_again(files)]
        if drafter is not None and drafter.head_again is not None:
            parts.append(drafter.head if files is None else drafter.head_again(parts[0], files))
        return tensors_of(parts, outside=self.outside)

    def tensors_of_drafter(self) -> list[Tensor]:
        """Return what a drafter has for itself on the device: a draft model, or a head from a folder of its own."""
        if self.drafter is None:
            return []
        return tensors_of([self.drafter.model, self.drafter.head], outside=[*self.outside, *self.tensors()])


class CUDAPart:
    """Satisfies `assembly.model_weights.ModelPart`.

    New weights are made on the host, and copied to where the old ones are: graphs stay valid, and the device needs no
    room for both. What sleeps loses its addresses, so graphs are dropped then, and captured again after waking.

    Args:
        device: of the runner.
        built: the runner, and its model.
        rank: number of this process among the ranks of the model.
    """

    __slots__ = ("_asleep", "_built", "_device", "_kv", "_of_drafter", "_weights", "rank")

    def __init__(self, device: Device, built: BuiltRunner, *, rank: int = 0) -> None:
        self._device = device
        self._built = built
        self.rank = rank
        """Number of the process among the ranks of the model."""
        self._weights = DeviceMemory(built.weights.tensors())
        self._of_drafter = DeviceMemory(built.weights.tensors_of_drafter())
        opened = [] if built.runner.recurrent is None else [built.runner.recurrent.opened]
        self._kv = DeviceMemory(
            [
                block
                for one in (built.memory, *built.beside, *opened)
                for layer in range(one.layout.num_layers)
                for block in one.blocks(layer)
            ]
        )
        self._asleep = set[str]()
        """Tags whose memory was given back."""  # contents written by: sleep, _take

    @property
    def has_chosen_form(self) -> bool:
        """Whether the form of its weights does not depend on the dtypes in its files: that of activations is theirs."""
        return True

    def load_again(self, files: TensorFiles) -> Callable[[], None]:
        """Read the model with the tensors of `files` on the host; return what copies them to the device."""
        own = self._built.weights
        found = own.tensors(files)

        def exchange() -> None:
            slept = "weights" in self._asleep  # they were dropped
            if slept:
                self._take("weights")
            with self._device.computing():
                replace_numbers(own.tensors(), found)
            self._device.finish()
            if slept and not self._asleep:
                self._built.runner.capture_graphs()

        return exchange

    def checksums(self) -> list[str]:
        """Return digests of the tensors on the device."""
        return checksums_of(one for one in self._built.weights.tensors() if one.numel())

    def sleep(self, command: Sleep) -> Callable[[], None]:
        """Return what keeps weights on the host, unless they are dropped, and gives memory back.

        Those of a drafter that updates do not replace are kept in any case.
        """

        def give_back() -> None:
            self._built.runner.drop_graphs()
            for tag in self._memories.keys() & command.tags:
                for memory in self._memories[tag]:
                    is_kept = memory is self._of_drafter or (memory is self._weights and not command.drops_weights)
                    memory.give_back(keeps=is_kept)
                self._asleep.add(tag)
            self._device.free_bytes()  # what torch keeps for later goes back, too

        return give_back

    def wake(self, command: WakeUp) -> Callable[[], None]:
        """Return what takes memory again, and captures graphs when all of it is there."""

        def take() -> None:
            for tag in self._memories.keys() & command.tags:
                self._take(tag)
            if not self._asleep:
                self._built.runner.capture_graphs()

        return take

    def close(self) -> None:
        """Do nothing: what sleeps is in memory."""

    def _take(self, tag: str) -> None:
        with self._device.computing():
            for memory in self._memories[tag]:
                memory.take()
        self._device.finish()
        self._asleep.remove(tag)

    @property
    def _memories(self) -> dict[str, tuple[DeviceMemory, ...]]:
        return {"weights": (self._weights, self._of_drafter), "kv_cache": (self._kv,)}


def why_fixed(config: EngineConfig) -> str | None:
    """Return why the weights of an engine on a device cannot be updated, or None."""
    return None if config.expert_kernels == "triton" else f"expert_kernels is {config.expert_kernels}"
