"""Updates of weights as questions to an engine, for `LLM` and `AsyncLLM`."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from pagewood.engine.api import Delta
from pagewood.engine.offline.calls import Question
from pagewood.engine.weight_commands import OldKV, UpdateWeights

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
    from pagewood.engine.offline.weight_files import written  # needs torch

    with written(tensors) as files:
        yield Question(UpdateWeights(request_id=request_id, files=files, version=version, old_kv=old_kv))


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
