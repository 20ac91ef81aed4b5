"""The weights and the KV memory of a model on a device, as they change and sleep; and why those of an engine do not."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import TYPE_CHECKING

import torch

from pagewood.engine.api import EngineConfig
from pagewood.engine.models.stored.tensor_files import TensorFiles
from pagewood.engine.runner.cuda.device import Device
from pagewood.engine.runner.cuda.device_memory import DeviceMemory, replace_numbers, tensors_of
from pagewood.engine.weight_commands import Sleep, WakeUp

if TYPE_CHECKING:
    from pagewood.engine.assembly.cuda.build import BuiltRunner


class CUDAPart:
    """Satisfies `assembly.model_weights.ModelPart`.

    New weights are made on the host, and copied to where the old ones are: graphs stay valid, and the device needs no
    room for both. What sleeps loses its addresses, so graphs are dropped then, and captured again after waking.

    Args:
        device: of the runner.
        built: the runner, and its model.
        rank: number of this process among the ranks of the model.
    """

    __slots__ = ("_asleep", "_built", "_device", "_kv", "_weights", "rank")

    def __init__(self, device: Device, built: BuiltRunner, *, rank: int = 0) -> None:
        self._device = device
        self._built = built
        self.rank = rank
        """Number of the process among the ranks of the model."""
        self._weights = DeviceMemory(self._tensors(built.decoder))
        memories = [built.memory, *([] if built.states is None else [built.states])]
        self._kv = DeviceMemory(
            [block for one in memories for layer in range(one.layout.num_layers) for block in one.blocks(layer)]
        )
        self._asleep = set[str]()
        """Tags whose memory was given back."""  # contents written by: sleep, _take

    @property
    def has_chosen_form(self) -> bool:
        """Whether the form of its weights does not depend on the dtypes in its files: that of activations is theirs."""
        return True

    def load_again(self, files: TensorFiles) -> Callable[[], None]:
        """Read the model with the tensors of `files` on the host; return what copies them to the device."""
        found = self._tensors(self._built.load_again(files))

        def exchange() -> None:
            slept = "weights" in self._asleep  # they were dropped
            if slept:
                self._take("weights", self._weights)
            with self._device.computing():
                replace_numbers(self._tensors(self._built.decoder), found)
            self._device.finish()
            if slept and not self._asleep:
                self._built.runner.capture_graphs()

        return exchange

    def checksums(self) -> list[str]:
        """Return digests of the tensors on the device."""
        own = [one.to("cpu", copy=True).contiguous().view(-1) for one in self._tensors(self._built.decoder)]
        return [sha256(one.view(torch.uint8).numpy().data).hexdigest() for one in own if len(one)]

    def sleep(self, command: Sleep) -> Callable[[], None]:
        """Return what keeps weights on the host, unless they are dropped, and gives memory back."""

        def give_back() -> None:
            self._built.runner.drop_graphs()
            for tag, memory in (("weights", self._weights), ("kv_cache", self._kv)):
                if tag in command.tags:
                    memory.give_back(keeps=tag == "weights" and not command.drops_weights)
                    self._asleep.add(tag)
            self._device.free_bytes()  # what torch keeps for later goes back, too

        return give_back

    def wake(self, command: WakeUp) -> Callable[[], None]:
        """Return what takes memory again, and captures graphs when all of it is there."""

        def take() -> None:
            for tag, memory in (("weights", self._weights), ("kv_cache", self._kv)):
                if tag in command.tags:
                    self._take(tag, memory)
            if not self._asleep:
                self._built.runner.capture_graphs()

        return take

    def close(self) -> None:
        """Do nothing: what sleeps is in memory."""

    def _take(self, tag: str, memory: DeviceMemory) -> None:
        with self._device.computing():
            memory.take()
        self._device.finish()
        self._asleep.remove(tag)

    def _tensors(self, decoder: object) -> list[torch.Tensor]:
        return tensors_of(decoder, outside=self._built.beside)


def why_fixed(config: EngineConfig) -> str | None:
    """Return why the weights of an engine on a device cannot be updated, or None."""
    return _first(
        config,
        (config.max_adapters > 0, f"max_adapters is {config.max_adapters}"),
        (config.expert_kernels != "triton", f"expert_kernels is {config.expert_kernels}"),
    )


def why_awake(config: EngineConfig) -> str | None:
    """Return why an engine on a device cannot give memory back, or None."""
    return _first(
        config, (config.host_cache_gb is not None, "host_cache_gb is set: copies to the host know the addresses of KV")
    )


def _first(config: EngineConfig, *more: tuple[bool, str]) -> str | None:
    refused = (
        *more,
        (config.decision_log is not None, "decision_log does not keep when that was done"),
        (config.speculative not in ("off", "ngram"), f"speculative is {config.speculative}"),
        (config.pipeline_parallel_size > 1, f"pipeline_parallel_size is {config.pipeline_parallel_size}"),
        (config.nnodes > 1, f"nnodes is {config.nnodes}"),
        (config.enable_dp_attention, "enable_dp_attention is True"),
    )
    return next((reason for is_so, reason in refused if is_so), None)
