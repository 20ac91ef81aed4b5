# pyright: basic
# torch is optional here, so it comes from importorskip, which has no types.
"""Writes of a decode step and of a chunk into one layer, beside a plain copy of the same bytes."""

from typing import Literal

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from pagewood.kvpool import MultiHeadLayout

torch = pytest.importorskip("torch")

from pagewood.kvpool.storage import KVStorage  # noqa: E402


@pytest.mark.parametrize("num_tokens", [8, 256, 2048])
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_write(benchmark: BenchmarkFixture, order: Literal["NHD", "HND"], num_tokens: int):
    layout = MultiHeadLayout(num_layers=1, num_kv_heads=8, head_dim=128, page_size=16, order=order)
    storage = KVStorage(layout, num_pages=4096)
    k, v = torch.randn(2, num_tokens, 8, 128)
    slots = torch.randperm(4096 * 16)[:num_tokens]
    benchmark(storage.write, 0, k, v, slots)


@pytest.mark.parametrize("num_tokens", [8, 256, 2048])
def test_plain_copy(benchmark: BenchmarkFixture, num_tokens: int):
    source = torch.randn(2, num_tokens, 8, 128)
    target = torch.zeros_like(source)
    benchmark(target.copy_, source)
