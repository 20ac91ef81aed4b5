"""Ranks of one model as threads of this process, which exchange tensors in memory."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import TypeVar

import torch
from torch import Tensor

from pagewood.engine.model_folder.load import load_model
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.models.shard import Shard
from pagewood.engine.models.torch_ops import TorchOps, WholeTexts, sum_of_ranks

_R = TypeVar("_R")
_PATIENCE_S = 60


class ThreadGroup:
    """Tensors that pass between `count` threads. Invariant: all ranks see the same ones, in the order of ranks."""

    def __init__(self, count: int) -> None:
        self._barrier = Barrier(count)
        self._tensors: list[Tensor] = [Tensor()] * count  # written by: exchange
        self.num_exchanges = 0  # written by: exchange

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, once each has called this."""
        self._tensors[rank] = x.clone()
        if self._barrier.wait(_PATIENCE_S) == 0:
            self.num_exchanges += 1
        found = list(self._tensors)
        self._barrier.wait(_PATIENCE_S)  # before anything is replaced
        return found

    def abort(self) -> None:
        """End the waiting of all ranks."""
        self._barrier.abort()


class ThreadExchange:
    """Satisfies `runner.cuda.exchange.Exchange` by a function that returns the tensors of all ranks."""

    is_queued = False

    def __init__(self, exchange: Callable[[Tensor], Sequence[Tensor]]) -> None:
        self._exchange = exchange

    def connect(self) -> None:
        """Do nothing."""

    def sum_ranks(self, x: Tensor) -> Tensor:
        """Add in the order of ranks."""
        return sum_of_ranks(x, self._exchange)

    def gather_ranks(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks."""
        return torch.stack(list(self._exchange(x)))

    def abort(self) -> None:
        """Do nothing."""


def on_ranks(count: int, work: Callable[[Shard, Callable[[Tensor], list[Tensor]]], _R]) -> list[_R]:
    """Return the results of `work` for each rank, which gets its shard and the exchange of its group.

    Raises:
        Exception: the first that a rank raises, apart from those of ranks that wait for it.
    """
    group = ThreadGroup(count)

    def run(rank: int) -> _R:
        try:
            return work(Shard(rank, count), lambda x: group.exchange(rank, x))
        except BaseException:
            group.abort()
            raise

    with ThreadPoolExecutor(count) as threads:
        futures = [threads.submit(run, rank) for rank in range(count)]
    errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None and not isinstance(error, BrokenBarrierError):
            raise error
    return [future.result() for future in futures]


def text_states(model: Decoder[Tensor], tokens: Tensor) -> Tensor:
    """Return the last states of a text at all positions, by a model over plain torch or a rank's part of it."""
    attention = WholeTexts([layer.mixer for layer in model.config.layers], len(tokens))
    positions = torch.arange(len(tokens))
    with torch.inference_mode():
        return model.states(tokens, [rope(positions) for rope in model.ropes], attention, positions)[0]


def text_logits(model: Decoder[Tensor], tokens: Tensor) -> Tensor:
    """Return the logits of a text at all positions."""
    states = text_states(model, tokens)
    with torch.inference_mode():
        return model.head(states)


def ranks_logits(
    folder: Path,
    tokens: Tensor,
    count: int,
    *,
    changes: Sequence[Callable[[ModelConfig], ModelConfig]] | None = None,
) -> list[Tensor]:
    """Return the logits of a text that each rank of the model in `folder` gets; `changes` are those of `load_model`."""

    def work(shard: Shard, exchange: Callable[[Tensor], list[Tensor]]) -> Tensor:
        change = None if changes is None else changes[shard.rank]
        return text_logits(load_model(folder, TorchOps(exchange=exchange), shard=shard, change=change), tokens)

    return on_ranks(count, work)
