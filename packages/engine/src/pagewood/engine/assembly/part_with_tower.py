"""The weights of a model with those of its tower for images, which change and sleep together."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

from pagewood.engine.assembly.model_weights import ModelPart
from pagewood.engine.core.images import NoImages
from pagewood.engine.models.images.tower import Tower
from pagewood.engine.models.stored.tensor_files import TensorFiles
from pagewood.engine.runner.device_memory import DeviceMemory, checksums_of, replace_numbers, tensors_of
from pagewood.engine.runner.tower_encoder import TowerEncoder
from pagewood.engine.weight_commands import Sleep, WakeUp


class PartWithTower:
    """A `ModelPart` and the tower beside it. Invariant: no image is computed while either changes or lacks memory.

    Args:
        part: the model.
        encoder: has the tower.
        read: returns a tower on the host, with the tensors of some files.
        gives_back: whether this gives the tower's memory back while weights sleep; otherwise `part` does.
    """

    __slots__ = ("_encoder", "_is_asleep", "_memory", "_part", "_read", "_tensors")

    def __init__(
        self, part: ModelPart, encoder: TowerEncoder, read: Callable[[TensorFiles], Tower], *, gives_back: bool
    ) -> None:
        self._part = part
        self._encoder = encoder
        self._read = read
        self._tensors = tensors_of(encoder.tower)
        self._memory = DeviceMemory(self._tensors if gives_back else [])
        self._is_asleep = False
        """Whether weights sleep or were dropped."""  # written by: part_with_tower

    @property
    def rank(self) -> int:
        """Number of the process among the ranks of the model."""
        return self._part.rank

    @property
    def has_chosen_form(self) -> bool:
        """Whether the form of its weights does not depend on the dtypes in its files."""
        return self._part.has_chosen_form

    def load_again(self, files: TensorFiles) -> Callable[[], None]:
        """Read model and tower with the tensors of `files`; return what computes later steps and images with them.

        What was made of images is forgotten then, unless the tower has the numbers that it had.
        """
        change, found = self._part.load_again(files), tensors_of(self._read(files))
        pairs = zip(self._tensors, found, strict=True)
        is_same = not self._is_asleep and all(torch.equal(own, one.to(own.device)) for own, one in pairs)

        def exchange() -> None:
            with self._resting():
                if self._is_asleep:  # they were dropped
                    self._memory.take()
                change()
                self._is_asleep = False
                if not is_same:
                    replace_numbers(self._tensors, found)
                    self._encoder.renew()

        return exchange

    def checksums(self) -> list[str]:
        """Return digests of the tensors in memory."""
        return self._part.checksums() + checksums_of(self._tensors)

    def sleep(self, command: Sleep) -> Callable[[], None]:
        """Prepare to give memory back."""
        change = self._part.sleep(command)

        def give_back() -> None:
            with self._resting():
                if "weights" in command.tags:
                    self._memory.give_back(keeps=not command.drops_weights)
                    self._is_asleep = True
                change()

        return give_back

    def wake(self, command: WakeUp) -> Callable[[], None]:
        """Prepare to take it again."""
        change = self._part.wake(command)

        def take() -> None:
            with self._resting():
                if "weights" in command.tags:
                    self._memory.take()
                    self._is_asleep = False
                change()

        return take

    def close(self) -> None:
        """Forget what was kept."""
        self._part.close()

    @contextmanager
    def _resting(self) -> Generator[None]:
        """Let no image be computed inside, nor behind it while weights sleep."""
        self._encoder.rest()
        try:
            yield
        finally:
            if not self._is_asleep:
                self._encoder.go_on()


def with_tower(
    part: ModelPart, encoder: TowerEncoder | NoImages, read: Callable[[TensorFiles], Tower], *, gives_back: bool
) -> ModelPart:
    """Return a `PartWithTower`, or `part` where the engine takes no images."""
    return part if isinstance(encoder, NoImages) else PartWithTower(part, encoder, read, gives_back=gives_back)
