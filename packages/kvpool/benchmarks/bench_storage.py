# pyright: basic
# torch is optional here, so it comes from importorskip, which has no types.
"""Writes of a decode step and of a chunk into one layer, and copies of pages, each with a plain copy to compare."""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from pagewood.kvpool import MultiHeadLayout

torch = pytest.importorskip("torch")

from pagewood.kvpool.storage import KVStorage  # noqa: E402

TOKENS = pytest.mark.parametrize("num_tokens", [8, 256, 2048])


@pytest.fixture(autouse=True)
def _one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@TOKENS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_write(benchmark: BenchmarkFixture, order, dtype: str, num_tokens: int):
    layout = MultiHeadLayout(num_layers=1, num_kv_heads=8, head_dim=128, page_size=16, order=order, dtype=dtype)
    storage = KVStorage(layout, num_pages=4096)
    k, v = torch.randn(2, num_tokens, 8, 128)
    slots = torch.randperm(4096 * 16)[:num_tokens]
    benchmark(storage.write, 0, k, v, slots)


@TOKENS
def test_plain_copy(benchmark: BenchmarkFixture, num_tokens: int):
    source = torch.randn(2, num_tokens, 8, 128)
    target = torch.zeros_like(source)
    benchmark(target.copy_, source)


@pytest.mark.parametrize("num_pages", [1, 64])
def test_copy_pages(benchmark: BenchmarkFixture, num_pages: int):
    layout = MultiHeadLayout(num_layers=1, num_kv_heads=8, head_dim=128, page_size=16)
    storage = KVStorage(layout, num_pages=4096)
    src, dst = torch.randperm(4096)[: 2 * num_pages].split(num_pages)
    benchmark(storage.copy_pages, src, dst)


@pytest.mark.parametrize("num_pages", [1, 64])
def test_plain_copy_of_pages(benchmark: BenchmarkFixture, num_pages: int):
    source = torch.ones(num_pages, 2 * 16 * 8 * 128)
    target = torch.zeros_like(source)
    benchmark(target.copy_, source)
