"""Updates of weights, and sleep, as questions to an engine, for `LLM` and `AsyncLLM`."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from pagewood.engine.api import Delta, FinishReason
from pagewood.engine.offline.calls import Question
from pagewood.engine.weight_commands import OldKV, SleepTag, UpdateWeights, WakeUp, sleep_at

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def weight_update(
    tensors: Iterable[tuple[str, Tensor]] | str | Path, *, version: str | None, old_kv: OldKV
) -> Generator[Question]:
    """Write tensors where the engine can read them, and give the question; a path is that of a folder.

    Raises:
        TypeError: an item is not a name with a tensor.
        ValueError: see `UpdateWeights`, or there is no tensor.
    """
    request_id = f"weights-{uuid4().hex}"
    if isinstance(tensors, str | Path):
        folder = str(tensors)
        yield Question(UpdateWeights(request_id=request_id, folder=folder, version=version, old_kv=old_kv))
        return
    from pagewood.engine.offline.weight_files import TensorFolder  # needs torch

    folder = TensorFolder()
    try:
        for name, tensor in tensors:
            folder.add(name, tensor)
        yield Question(UpdateWeights(request_id=request_id, files=folder.files(), version=version, old_kv=old_kv))
    finally:
        folder.close()


def answered_version(answer: Delta) -> str:
    """Return the version that an update has made.

    Raises:
        ValueError: it was refused.
        RuntimeError: the engine has ended before it.
    """
    if answer.refusal is not None:
        raise ValueError(answer.refusal.message)
    if not answer.weights:
        raise RuntimeError("the engine has ended before the weights were read")
    return answer.weights


def sleep_question(level: int) -> Question:
    """Return the question that lets an engine sleep.

    Raises:
        ValueError: the level is not 0, 1 or 2.
    """
    return Question(sleep_at(level, f"sleep-{uuid4().hex}"))


def wake_question(tags: Sequence[SleepTag] | None) -> Question:
    """Return the question that wakes an engine up.

    Raises:
        ValueError: a tag is unknown.
    """
    return Question(WakeUp(request_id=f"wake-{uuid4().hex}", tags=tuple(tags or ())))


def check_done(answer: Delta) -> None:
    """Check that a command was carried out.

    Raises:
        ValueError: it was refused.
        RuntimeError: the engine has ended before it.
    """
    if answer.refusal is not None:
        raise ValueError(answer.refusal.message)
    if answer.finish is not FinishReason.STOP:
        raise RuntimeError("the engine has ended before that")
