"""The weights and the KV memory of a model on a CPU, as they change and sleep; and why those of an engine do not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pagewood.engine.assembly.cpu.rank import CPURank
from pagewood.engine.models.images.tower import Tower
from pagewood.engine.models.stored.tensor_files import TensorFiles
from pagewood.engine.runner.cpu.weights.matrix_memory import MatrixMemory, StoredMatrices
from pagewood.engine.runner.device_memory import memory_of, tensors_of
from pagewood.engine.weight_commands import Sleep, WakeUp
from pagewood.kvpool.system_pages import can_return_pages


class CPUPart:
    """Satisfies `assembly.model_weights.ModelPart` for the model of a rank, which has a `number` among all.

    The memory of the model's `tower`, if it has one, goes back with that of its weights.
    """

    __slots__ = ("_rank", "_stored", "_tower", "rank")

    def __init__(self, rank: CPURank, *, tower: Tower | None = None, number: int = 0) -> None:
        self.rank = number
        """Number of the process among the ranks of the model."""
        self._rank = rank
        self._tower = MatrixMemory(made=memory_of(tensors_of(tower)))
        self._stored: StoredMatrices | None = None
        """The weights while they sleep."""  # written by: sleep, wake

    @property
    def has_chosen_form(self) -> bool:
        """Whether the form of its weights does not depend on the dtypes in its files."""
        return self._rank.has_chosen_form

    def load_again(self, files: TensorFiles) -> Callable[[], None]:
        """Read the model with the tensors of `files`; return what computes later steps with them."""
        return partial(self._rank.exchange, *self._rank.load_again(files))

    def checksums(self) -> list[str]:
        """Return digests of the matrices in memory."""
        return self._rank.loaded.memory.checksums()

    def sleep(self, command: Sleep) -> Callable[[], None]:
        """Write weights to a file, unless they are dropped; return what gives memory back.

        A drafter stays where it is if they are dropped, because an update need not bring its weights.
        """
        rank = self._rank
        memories = [rank.loaded.memory, self._tower] if "weights" in command.tags else []
        memories += [rank.drafter_matrices] if memories and not command.drops_weights else []
        stored = StoredMatrices(memories) if memories and not command.drops_weights else None

        def give_back() -> None:
            self._stored = stored or self._stored
            for memory in memories:
                memory.give_back()
            if "kv_cache" in command.tags:
                rank.give_back_kv()

        return give_back

    def wake(self, command: WakeUp) -> Callable[[], None]:
        """Read weights back; return what makes them usable."""
        if "weights" in command.tags and self._stored is not None:
            self._stored.restore()

        def wake() -> None:
            if "weights" in command.tags and self._stored is not None:
                self._stored.close()
                self._stored = None
            if "kv_cache" in command.tags:
                self._rank.provide_kv()

        return wake

    def close(self) -> None:
        """Forget what sleeps."""
        if self._stored is not None:
            self._stored.close()


def why_awake() -> str | None:
    """Return why an engine on a CPU cannot give memory back, or None."""
    return None if can_return_pages() else "the system is not Linux"
