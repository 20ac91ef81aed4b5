# pyright: basic
# torch is optional here, so it comes from importorskip, which has no types; examples are loaded by path.
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from pagewood.kvpool import MultiHeadLayout, OutOfPages

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
    cache = load("minimal_cache").PagedCache(layout, num_bytes=20 * layout.bytes_per_page)
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


def test_the_minimal_cache_is_short():
    assert len((EXAMPLES / "minimal_cache.py").read_text(encoding="utf-8").splitlines()) < 60
