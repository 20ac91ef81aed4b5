"""What models and heads draft on CUDA devices, by the text that they draft for."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pagewood.engine.runner.cuda.drafts.drafting_head import EagleDrafter
from pagewood.engine.runner.cuda.drafts.drafting_model import DraftModel
from pagewood.engine.runner.cuda.drafts.verify import DraftRequest

Notes = dict[tuple[int, tuple[int, ...]], tuple[int, ...]]
"""The drafts of a step by seed and text, without those for which the step has no room."""


def drafts_noted(monkeypatch: pytest.MonkeyPatch) -> Notes:
    """Note what models and heads draft from now on."""
    notes: Notes = {}
    for kind in (DraftModel, EagleDrafter):

        def draft(own: Any, request: DraftRequest, real: Any = kind.draft) -> tuple[torch.Tensor, torch.Tensor]:
            drafts, found = real(own, request)
            granted = request.kv_lens - request.host_starts - 1
            most = found.numpy() if request.spare_page is not None else np.minimum(found.numpy(), granted)
            rows = zip(request.sampling.seeds.tolist(), request.rows, request.lengths, drafts, most, strict=True)
            for seed, row, length, one, num in rows:
                notes[seed, tuple(request.tokens[row, :length].tolist())] = tuple(one[:num].tolist())
            return drafts, found

        monkeypatch.setattr(kind, "draft", draft)
    return notes


def check_alike(notes: Notes, others: Notes) -> None:
    """Check that the drafts behind the same texts are the same, as far as both have any."""
    common = [(own, others[text]) for text, own in notes.items() if text in others]
    assert sum(min(map(len, pair)) for pair in common) > 20 or not others
    assert all(own[: len(other)] == other[: len(own)] for own, other in common), "other drafts"
