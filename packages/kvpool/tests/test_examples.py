# pyright: basic
# torch is optional here, so it comes from importorskip, which has no types; examples are loaded by path.
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from pagewood.kvpool import MultiHeadLayout, OutOfPages, PageAllocator, RowPool

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def causal_attention(torch, q, k, v):
    """Compute dense attention from the last `len(q)` tokens; all arrays are `[tokens, heads, dim]`."""
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * q.shape[2] ** -0.5
    is_hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
    return torch.einsum(
        "hqk,khd->qhd", scores.masked_fill(is_hidden, -torch.inf).softmax(-1), v.repeat_interleave(group, 1)
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 3e-2), ("int8", 3e-2)])
def test_the_minimal_cache_computes_the_same_as_dense_attention(dtype: str, tolerance: float):
    torch = pytest.importorskip("torch")
    layout = MultiHeadLayout(num_layers=2, num_kv_heads=2, head_dim=16, page_size=4, dtype=dtype)
    cache = load("minimal_cache").PagedCache(
        layout, num_bytes=20 * layout.bytes_per_page, max_requests=3, max_length=64
    )
    requests = {cache.begin(): torch.empty(2, 2, 0, 2, 16) for _ in range(3)}  # [layer, k or v, tokens, head, dim]
    for num_new in (7, 1, 1, 5, 1):
        for request in requests:
            slots = cache.extend(request, num_new)
            requests[request] = torch.cat((requests[request], torch.randn(2, 2, num_new, 2, 16)), dim=2)
            for layer in range(2):
                k, v = requests[request][layer]
                q = torch.randn(num_new, 4, 16)
                out = cache.attend(layer, request, q, k[-num_new:], v[-num_new:], slots)
                assert torch.allclose(out, causal_attention(torch, q, k, v), atol=tolerance)
    assert cache.allocator.num_free == 20 - 3 * 4
    with pytest.raises(OutOfPages):
        cache.extend(next(iter(requests)), 40)
    for request in requests:
        cache.end(request)
    assert cache.allocator.num_free == 20
    with pytest.raises(ValueError, match="which is stale"):
        cache.rows.pages(request)


def test_the_minimal_cache_is_short():
    assert len((EXAMPLES / "minimal_cache.py").read_text(encoding="utf-8").splitlines()) < 60


@pytest.mark.parametrize("halves", ["joint", "pair"])
def test_flashinfer_arrays_locate_the_keys_of_every_request(halves):
    """Read pages as FlashInfer documents it: request i has `indices[indptr[i]:indptr[i+1]]`, the last one in part."""
    torch = pytest.importorskip("torch")
    from pagewood.kvpool.storage import KVStorage

    grow = load("flashinfer_shapes").grow
    layout = MultiHeadLayout(num_layers=1, num_kv_heads=2, head_dim=8, page_size=4, halves=halves)
    storage = KVStorage(layout, 40)
    rows, allocator = RowPool(num_rows=5, max_pages=10), PageAllocator(40)
    allocator.free(np.random.default_rng(0).permutation(allocator.alloc(40)).astype(np.int32))
    rows.alloc(1)
    tickets = rows.alloc(3)
    keys = [torch.empty(0, 2, 8) for _ in range(3)]
    for lengths in ([5, 16, 1], [6, 17, 2], [9, 20, 9]):
        paged = grow(rows, allocator, tickets, np.array(lengths, dtype=np.int32), 4)
        assert [array.dtype for array in (paged.indptr, paged.indices, paged.last_page_len)] == [np.int32] * 3
        for i, length in enumerate(lengths):
            own = paged.indices[paged.indptr[i] : paged.indptr[i + 1]]
            positions = np.arange(len(keys[i]), length)
            slots = torch.from_numpy(own[positions // 4] * 4 + positions % 4)
            keys[i] = torch.cat((keys[i], torch.randn(len(positions), 2, 8)))
            storage.write(0, keys[i][positions], -keys[i][positions], slots)
        k_cache, v_cache = storage.halves(0) if halves == "pair" else storage.layer(0).unbind(1)
        for i in range(3):
            own = paged.indices[paged.indptr[i] : paged.indptr[i + 1]]
            num_tokens = (len(own) - 1) * 4 + paged.last_page_len[i]
            assert torch.equal(k_cache[torch.from_numpy(own)].flatten(0, 1)[:num_tokens], keys[i])
            assert torch.equal(v_cache[torch.from_numpy(own)].flatten(0, 1)[:num_tokens], -keys[i])


def test_the_flashinfer_example_runs():
    done = subprocess.run(
        [sys.executable, EXAMPLES / "flashinfer_shapes.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "indptr [0 1 3 5], indices [0 1 2 3 4], last_page_len [ 5 16  1]",
        "indptr [0 1 4 6], indices [0 1 2 5 3 4], last_page_len [6 1 2]",
    ]
