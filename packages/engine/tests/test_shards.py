"""Models divided among ranks against the same models whole: every family, over plain torch.

Logits differ in their last bits: a sum over the inputs of a projection becomes a sum of sums, one for each rank.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from families.case import build
from families.registry import CASES
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.models.shard import WHOLE, Shard
from pagewood.engine.models.torch_ops import TorchOps, WholeTexts
from rank_threads import on_ranks

LENGTH = 40


@pytest.fixture(scope="module", params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    build(CASES[request.param], folder)
    return folder


def _logits(
    folder: Path, tokens: Tensor, shard: Shard = WHOLE, exchange: Callable[[Tensor], list[Tensor]] | None = None
) -> Tensor:
    model = load_model(folder, TorchOps(exchange=exchange), shard=shard)
    attention = WholeTexts([layer.mixer for layer in model.config.layers], LENGTH)
    positions = torch.arange(LENGTH)
    with torch.inference_mode():
        return model(tokens, [rope(positions) for rope in model.ropes], attention, torch.arange(LENGTH))


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_compute_what_one_does(folder: Path, count: int) -> None:
    torch.manual_seed(5)
    tokens = torch.randint(0, 97, (LENGTH,))
    whole = _logits(folder, tokens)
    parts = on_ranks(count, lambda shard, exchange: _logits(folder, tokens, shard, exchange))
    for logits in parts:
        assert torch.equal(logits, parts[0])
    torch.testing.assert_close(parts[0], whole, atol=1e-4, rtol=0)
