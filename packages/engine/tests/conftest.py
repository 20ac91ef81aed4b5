# pyright: basic
# torch is typed in part only.

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pagewood.engine.runner.cuda import ops
from pagewood.kvpool.tiers import PrefetchPolicy


@pytest.fixture
def patient_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests wait for pages from a store however long it takes; by default they compute after about a second."""
    monkeypatch.setattr(PrefetchPolicy, "patience_s", lambda self, num_tokens: float("inf"))


@pytest.fixture(scope="module")
def small_buffers() -> Iterator[None]:
    """Shrink the buffers of the CUDA path to the size of the stand-ins' tensors, and use one torch thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pagewood.engine.runner.cuda.attention.WORKSPACE_BYTES", 1024)
        patch.setattr("pagewood.engine.runner.cuda.staging.STAGING_BYTES", 1024)
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(num_threads)


@pytest.fixture
def gates_by_element(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, torch's functions have other bits in the last numbers of an array, which fill no vector instruction."""
    plain = ops.gated_columns
    monkeypatch.setattr(ops, "gated_columns", lambda x, gate: plain(x.double(), gate).to(x.dtype))
    add = ops.CUDAOps.add_gated

    def add_gated(own: ops.CUDAOps, x: Tensor, y: Tensor, gate: Tensor | None) -> Tensor:
        return add(own, x, y, None if gate is None else gate.double())

    monkeypatch.setattr(ops.CUDAOps, "add_gated", add_gated)
