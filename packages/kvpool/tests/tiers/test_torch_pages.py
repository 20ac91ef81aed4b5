# pyright: basic
# torch is optional here, so it comes from importorskip, which has no types.
"""The memory of a pool in the form that the tiers use."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewood.kvpool import MultiHeadLayout
from pagewood.kvpool.tiers import HostTier, StatePages
from pagewood.kvpool.tiers.pages.device import ArrayPages, DevicePages

torch = pytest.importorskip("torch")

from pagewood.kvpool.storage import KVStorage  # noqa: E402
from pagewood.kvpool.tiers import torch_pages  # noqa: E402
from pagewood.kvpool.tiers.torch_pages import (  # noqa: E402
    CUDACopyStream,
    QueuedCopies,
    StagedPages,
    device_pages,
    pinned_memory,
)


class Stream:
    """A stream on the CPU, which copies at once; it counts copies that were not waited for."""

    def __init__(self) -> None:
        self.num_queued = 0

    def queueing(self) -> AbstractContextManager[object]:
        self.num_queued += 1
        return nullcontext()

    def wait(self) -> None:
        self.num_queued = 0


def check(pages: DevicePages, storage: Any, host: HostTier, *, wait: Callable[[], None] = lambda: None) -> None:
    device = storage.device
    for layer in range(storage.layout.num_layers):
        k, v = torch.randn(2, 64, 2, 8, device=device)
        storage.write(layer, k, v, torch.arange(64, device=device))
    wait()
    assert pages.page_bytes == storage.layout.bytes_per_page
    pages.read([3, 1, 9], host.memory, [5, 6, 2])
    expected = [storage.memory.checksum(page) for page in (3, 1, 9)]
    storage.memory.zero_pages(torch.tensor([3, 1, 9], device=device))
    reports: list[int] = []
    pages.write([10, 11, 12], host.memory, [5, 6, 2], reports.append)
    assert reports[-1] == storage.layout.num_layers
    assert [storage.memory.checksum(page) for page in (10, 11, 12)] == expected


def storage_of(dtype: str, device: str = "cpu") -> Any:
    layout = MultiHeadLayout(num_layers=3, num_kv_heads=2, head_dim=8, page_size=4, dtype=dtype)
    return KVStorage(layout, 16, device=device)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_pages_of_any_dtype_are_copied_out_and_back(dtype: str) -> None:
    storage = storage_of(dtype)
    host = HostTier(page_bytes=storage.layout.bytes_per_page, num_pages=8)
    check(device_pages(storage.memory), storage, host)
    layers = [storage.memory.blocks(layer) for layer in range(3)]
    staged = StagedPages(layers, out=Stream(), into=Stream())
    check(staged, storage, host)
    wide = np.zeros((8, 16 + staged.page_bytes + 8), np.uint8)  # images are parts of wider ones
    columns: Any = SimpleNamespace(memory=wide[:, 16:-8])
    for pages in (device_pages(storage.memory), staged):
        check(pages, storage, columns)
    assert not wide[:, :16].any()
    assert not wide[:, -8:].any()


@settings(deadline=None)
@given(
    widths=st.lists(st.lists(st.sampled_from([1, 6, 8, 24, 64]), min_size=1, max_size=2), min_size=1, max_size=5),
    pages=st.permutations(range(12)),
    slots=st.permutations(range(9)),
    count=st.integers(0, 9),
    sizes=st.tuples(st.integers(1, 300), st.integers(1, 100)),
)
def test_staged_copies_equal_those_of_arrays(
    widths: list[list[int]], pages: list[int], slots: list[int], count: int, sizes: tuple[int, int]
) -> None:
    rng = np.random.default_rng(0)
    layers = [[rng.integers(0, 256, (12, n), np.uint8) for n in row] for row in widths]
    tensors = [[torch.from_numpy(array.copy()) for array in arrays] for arrays in layers]
    out, into = Stream(), Stream()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_pages, "_CHUNK_BYTES", sizes[0])
        patch.setattr(torch_pages, "_PIECE_BYTES", sizes[1])
        staged, plain = StagedPages(tensors, out=out, into=into), ArrayPages(layers)
        mine, expected = (np.zeros((9, plain.page_bytes), np.uint8) for _ in range(2))
        pages, slots = pages[:count], sorted(slots[:count]) if sizes[0] % 2 else slots[:count]
        plain.read(pages, expected, slots)
        staged.read(pages, mine, slots)
        assert out.num_queued == 0
        assert np.array_equal(mine, expected)
        reports: list[int] = []

        def arrived(num_layers: int) -> None:
            assert into.num_queued == 0
            for arrays, others in zip(layers[:num_layers], tensors[:num_layers], strict=True):
                assert all(np.array_equal(array, other) for array, other in zip(arrays, others, strict=True))
            reports.append(num_layers)

        there = pages[::-1]
        plain.write(there, expected, slots, lambda n: None)
        staged.write(there, expected, slots, arrived)
    assert reports == sorted(set(reports))
    assert reports[-1] == len(layers)


def test_a_cancelled_copy_has_ended_when_the_call_raises() -> None:
    class Cancelled(Exception):
        pass

    def cancel(num_layers: int) -> None:
        raise Cancelled

    storage, out, into = storage_of("float32"), Stream(), Stream()
    staged = StagedPages([storage.memory.blocks(layer) for layer in range(3)], out=out, into=into)
    memory = np.zeros((8, staged.page_bytes), np.uint8)
    with pytest.raises(Cancelled):
        staged.write([1], memory, [1], cancel)
    assert into.num_queued == 0
    with pytest.raises(IndexError):
        staged.read([16], memory, [1])
    assert out.num_queued == 0


def check_states(layers: Any, copies: QueuedCopies, memory: Any, *, wait: Callable[[], None] = lambda: None) -> None:
    """Copy a state out and to another place, in parts; `memory` has slots of the host."""
    page_bytes = memory.shape[1]
    pages = ArrayPages([[np.zeros((4, page_bytes), np.uint8)]])
    plain = StatePages(pages, [[array.cpu().numpy() for array in arrays] for arrays in layers])
    states = StatePages(pages, layers, copies=copies)
    slots = list(range(len(memory)))[::-1][: plain.num_parts]
    expected = np.full_like(memory, 0xEE)
    plain.read(plain.parts_of(1), expected, slots)
    memory[:] = 0xEE
    states.read(states.parts_of(1), memory, slots)
    assert np.array_equal(memory, expected)
    states.write(states.parts_of(2), memory, slots, lambda _: None)
    wait()
    assert all(torch.equal(array[2], array[1]) for arrays in layers for array in arrays)


def states_of(device: str) -> list[list[Any]]:
    shapes = ((3, 24), (3, 4096)), ((3, 24), (3, 4096))
    return [[torch.randint(256, shape, dtype=torch.uint8, device=device) for shape in layer] for layer in shapes]


def test_states_are_copied_by_streams() -> None:
    layers, out, into, slots = states_of("cpu"), Stream(), Stream(), np.zeros((9, 1024), np.uint8)
    copies = QueuedCopies(out, into)
    check_states(layers, copies, slots)
    assert out.num_queued == into.num_queued == 0

    def cancel(num_layers: int) -> None:
        raise InterruptedError

    states = StatePages(ArrayPages([[slots]]), layers, copies=copies)
    with pytest.raises(InterruptedError):
        states.write(states.parts_of(0), slots, range(9), cancel)
    assert into.num_queued == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_states_of_a_gpu_are_copied_out_and_back() -> None:
    where = torch.device("cuda")
    for memory in (np.zeros((9, 1024), np.uint8), pinned_memory(9, 1024)):
        layers, streams = states_of("cuda"), [CUDACopyStream(where) for _ in range(2)]
        torch.cuda.synchronize()
        check_states(layers, QueuedCopies(*streams), memory, wait=torch.cuda.synchronize)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_pages_of_a_gpu_are_copied_out_and_back(dtype: str) -> None:
    storage = storage_of(dtype, "cuda")
    page_bytes = storage.layout.bytes_per_page
    waited_for, ordered = device_pages(storage.memory), device_pages(storage.memory, after=torch.cuda.current_stream())
    for memory in (None, pinned_memory(8, page_bytes)):
        check(ordered, storage, HostTier(page_bytes=page_bytes, num_pages=8, memory=memory))
        host = HostTier(page_bytes=page_bytes, num_pages=8, memory=memory)
        check(waited_for, storage, host, wait=torch.cuda.synchronize)
    assert torch.from_numpy(pinned_memory(8, page_bytes)).is_pinned()
