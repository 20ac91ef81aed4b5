# pyright: basic
# torch is optional here, so it comes from importorskip, which has no types.
import os
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewood.kvpool import MultiHeadLayout

torch = pytest.importorskip("torch")

from pagewood.kvpool.storage import KVStorage  # noqa: E402

Order = Literal["NHD", "HND"]
ORDERS: list[Order] = ["NHD", "HND"]
HAS_CUDA: bool = torch.cuda.is_available()
CUDA_MARKS = [pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=CUDA_MARKS)]


def make(order: Order, *, num_pages: int = 6, page_size: int = 4, dtype: str = "float32", device: str = "cpu"):
    layout = MultiHeadLayout(num_layers=3, num_kv_heads=2, head_dim=5, page_size=page_size, dtype=dtype, order=order)
    return KVStorage(layout, num_pages, device=device)


def naive_write(memory, order: Order, page_size: int, k, v, slots: list[int]):
    for token, slot in enumerate(slots):
        page, offset = divmod(slot, page_size)
        for half, values in enumerate((k, v)):
            if order == "NHD":
                memory[page, half, offset] = values[token]
            else:
                memory[page, half, :, offset] = values[token]


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=50)
@given(st.data())
def test_write_is_what_a_loop_over_tokens_writes(order: Order, data: st.DataObject):
    page_size = data.draw(st.integers(1, 5))
    storage = make(order, page_size=page_size)
    expected = [storage.layer(i).clone() for i in range(3)]
    for _ in range(3):
        layer = data.draw(st.integers(0, 2))
        slots = data.draw(st.lists(st.integers(0, 6 * page_size - 1), unique=True))
        k, v = torch.randn(2, len(slots), 2, 5)
        storage.write(layer, k, v, torch.tensor(slots, dtype=data.draw(st.sampled_from([torch.int32, torch.int64]))))
        naive_write(expected[layer], order, page_size, k, v, slots)
    for layer in range(3):
        assert torch.equal(storage.layer(layer), expected[layer])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_layer_has_the_layouts_shape_strides_and_dtype_and_starts_as_zeros(order: Order, dtype: str, device: str):
    storage = make(order, dtype=dtype, device=device)
    for layer in range(3):
        memory = storage.layer(layer)
        assert memory.shape == storage.layout.shape(6)
        assert memory.stride() == storage.layout.strides
        assert memory.dtype == getattr(torch, dtype)
        assert memory.device.type == storage.device.type == device
        assert not memory.any()
    assert storage.layer(0).data_ptr() % 64 == 0
    with pytest.raises(IndexError):
        storage.layer(3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", ORDERS)
def test_keys_and_values_that_are_views_are_written(order: Order, device: str):
    storage = make(order, device=device)
    qkv = torch.randn(3, 5, 6, device=device)  # [tokens, head_dim, q and k and v heads], as a fused projection gives
    k, v = qkv.transpose(1, 2)[:, 2:4], qkv.transpose(1, 2)[:, 4:]
    storage.write(1, k, v, torch.tensor([23, 0, 9], device=device))
    memory = storage.layer(1)
    page = memory[5] if order == "NHD" else memory[5].transpose(1, 2)
    assert torch.equal(page[0, 3], k[0])
    assert torch.equal(page[1, 3], v[0])


@pytest.mark.parametrize("order", ORDERS)
def test_memory_is_shared_with_numpy(order: Order):
    storage = make(order)
    view = storage.layer(2).numpy()
    storage.write(2, torch.ones(1, 2, 5), torch.ones(1, 2, 5), torch.tensor([0]))
    assert view.sum() == 20


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("slot", [-25, -24, -1, 24, 25])
def test_slots_outside_the_pool_are_refused_and_nothing_is_written(order: Order, slot: int):
    storage = make(order)
    with pytest.raises(IndexError):
        storage.write(0, torch.ones(1, 2, 5), torch.ones(1, 2, 5), torch.tensor([slot]))
    assert not storage.layer(0).any()


@pytest.mark.parametrize("order", ORDERS)
def test_shapes_that_do_not_fit_are_refused(order: Order):
    storage = make(order)
    fits, slots = torch.ones(2, 2, 5), torch.tensor([0, 1])
    for wrong in (torch.ones(1, 2, 5), torch.ones(2, 1, 10), torch.ones(2, 10)):
        with pytest.raises(ValueError, match=r"k and v must have shape \(2, 2, 5\), got"):
            storage.write(0, wrong, fits, slots)
        with pytest.raises(ValueError, match=r"k and v must have shape \(2, 2, 5\), got"):
            storage.write(0, fits, wrong, slots)
    with pytest.raises(ValueError, match="num_pages must be >= 1, got 0"):
        make(order, num_pages=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", ORDERS)
def test_copy_pages_reads_all_before_it_writes_in_every_layer(order: Order, device: str):
    storage = make(order, device=device)
    for layer in range(3):
        storage.layer(layer).normal_()
    before = [storage.layer(layer).clone() for layer in range(3)]
    storage.copy_pages(torch.tensor([0, 1, 1], device=device), torch.tensor([1, 0, 5], device=device))
    for layer in range(3):
        assert torch.equal(storage.layer(layer), before[layer][[1, 0, 2, 3, 4, 1]])
    with pytest.raises(ValueError, match="src and dst must have one shape"):
        storage.copy_pages(torch.tensor([0], device=device), torch.tensor([1, 2], device=device))


def resident_bytes() -> int:
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return num_pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the resident size from /proc")
def test_a_page_costs_memory_when_it_is_first_written():
    layout = MultiHeadLayout(num_layers=2, num_kv_heads=8, head_dim=128, page_size=16)
    before = resident_bytes()
    storage = KVStorage(layout, layout.pages_for(2**30))
    storage.write(1, torch.ones(1, 8, 128), torch.ones(1, 8, 128), torch.tensor([storage.num_pages * 16 - 1]))
    assert resident_bytes() - before < 2**26
    assert storage.layer(1)[-1].sum() == 2 * 8 * 128
