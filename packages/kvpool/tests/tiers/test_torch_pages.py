# pyright: basic
# torch is optional here, so it comes from importorskip, which has no types.
"""The memory of a KVStorage, as the tiers see it."""

import numpy as np
import pytest

from pagewood.kvpool import MultiHeadLayout
from pagewood.kvpool.tiers import HostTier

torch = pytest.importorskip("torch")

from pagewood.kvpool.storage import KVStorage  # noqa: E402
from pagewood.kvpool.tiers.torch_pages import CudaPages, device_pages, pinned_memory  # noqa: E402


def check(device: str, dtype: str, host_memory: np.ndarray | None = None) -> None:
    layout = MultiHeadLayout(num_layers=3, num_kv_heads=2, head_dim=8, page_size=4, dtype=dtype)
    storage = KVStorage(layout, 16, device=device)
    for layer in range(3):
        k, v = torch.randn(2, 64, 2, 8, device=device)
        storage.write(layer, k, v, torch.arange(64, device=device))
    pages = device_pages(storage.memory)
    assert pages.page_bytes == layout.bytes_per_page
    host = HostTier(page_bytes=layout.bytes_per_page, num_pages=8, memory=host_memory)
    pages.read([3, 1, 9], host.memory, [5, 6, 2])
    expected = [storage.memory.checksum(page) for page in (3, 1, 9)]
    storage.memory.zero_pages(torch.tensor([3, 1, 9], device=device))
    for layer in range(3):
        pages.write(layer, [10, 11, 12], host.memory, [5, 6, 2])
    assert [storage.memory.checksum(page) for page in (10, 11, 12)] == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_pages_of_any_dtype_go_out_and_come_back(dtype: str) -> None:
    check("cpu", dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_pages_of_a_gpu_go_out_and_come_back(dtype: str) -> None:
    layout = MultiHeadLayout(num_layers=3, num_kv_heads=2, head_dim=8, page_size=4, dtype=dtype)
    check("cuda", dtype)
    check("cuda", dtype, pinned_memory(8, layout.bytes_per_page))
    storage = KVStorage(layout, 16, device="cuda")
    assert isinstance(device_pages(storage.memory), CudaPages)
