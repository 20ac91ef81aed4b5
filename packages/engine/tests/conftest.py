# pyright: basic
# torch is typed in part only.

from collections.abc import Iterator

import pytest
import torch

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
