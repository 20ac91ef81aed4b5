# pyright: basic
# torch is optional here, so it comes from importorskip, which has no types.
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewood.kvpool import JointLayout, MultiHeadLayout, PageArray, StateLayout

torch = pytest.importorskip("torch")

from pagewood.kvpool.memory import allocate, allocate_joint  # noqa: E402
from pagewood.kvpool.storage import KVStorage  # noqa: E402

ORDERS = ["NHD", "HND"]
HALVES = ["joint", "pair"]
DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"]
# The largest error of a number in (-4, 4): half a unit in the last place, and for int8 half of 4 / 127.
TOLERANCE = dict(zip(DTYPES, [0, 2**-10, 2**-7, 2**-3, 2**-2, 2 / 126], strict=True))
HAS_CUDA: bool = torch.cuda.is_available()
CUDA_MARKS = [pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=CUDA_MARKS)]


def make_layout(**changes: Any) -> MultiHeadLayout:
    sizes: dict[str, Any] = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 5, "page_size": 4}
    return MultiHeadLayout(**(sizes | changes))


def make(*, num_pages: int = 6, device: str = "cpu", is_shared: bool = False, **changes: Any) -> KVStorage:
    layout = make_layout(**changes)
    if not is_shared:
        return KVStorage(layout, num_pages, device=device)
    state = StateLayout(num_layers=1, arrays=(PageArray(name="ssm", dtype="float32", shape=(1001,)),))
    memory = allocate_joint(JointLayout(parts=(state, layout)), num_pages, device=device)[1][1]
    return KVStorage(layout, num_pages, memory=memory)


def naive_write(storage: KVStorage, layer: int, k, v, slots: list[int]):
    """Write token by token, into layouts whose values need no scales."""
    for token, slot in enumerate(slots):
        page, offset = divmod(slot, storage.layout.page_size)
        for half, values in zip(storage.halves(layer), (k, v), strict=True):
            if storage.layout.order == "NHD":
                half[page, offset] = values[token]
            else:
                half[page, :, offset] = values[token]


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("halves", HALVES)
@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=25)
@given(data=st.data())
def test_write_stores_the_same_as_a_loop_over_tokens(order: str, halves: str, is_shared: bool, data: st.DataObject):
    page_size = data.draw(st.integers(1, 5))
    storage, expected = (
        make(order=order, halves=halves, page_size=page_size, is_shared=is_shared, dtype="bfloat16") for _ in range(2)
    )
    for _ in range(3):
        layer = data.draw(st.integers(0, 2))
        slots = data.draw(st.lists(st.integers(0, 6 * page_size - 1), unique=True))
        k, v = torch.randn(2, len(slots), 2, 5)
        storage.write(layer, k, v, torch.tensor(slots, dtype=data.draw(st.sampled_from([torch.int32, torch.int64]))))
        naive_write(expected, layer, k, v, slots)
    assert [storage.checksum(page) for page in range(6)] == [expected.checksum(page) for page in range(6)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("halves", HALVES)
def test_read_returns_what_was_written(halves: str, order: str, dtype: str, is_shared: bool, device: str):
    storage = make(halves=halves, order=order, dtype=dtype, is_shared=is_shared, device=device)
    expected = torch.zeros(3, 2, 24, 2, 5, device=device)
    for layer in (0, 2, 0):
        slots = torch.randperm(24, device=device)[:7]
        k, v = (torch.rand(2, 7, 2, 5, device=device) * 8 - 4).unbind(0)
        storage.write(layer, k, v, slots)
        expected[layer, 0, slots], expected[layer, 1, slots] = k, v
    slots = torch.randperm(24, device=device).int()
    for layer in range(3):
        for half, read in enumerate(storage.read(layer, slots)):
            assert read.dtype == torch.float32
            assert torch.allclose(read, expected[layer, half, slots.long()], atol=TOLERANCE[dtype], rtol=0)
    assert storage.read(0, slots, dtype=torch.bfloat16)[1].dtype == torch.bfloat16


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
def test_a_layer_has_the_layouts_shape_strides_and_dtype_and_starts_as_zeros(order: str, dtype: str, device: str):
    storage = make(order=order, dtype=dtype, device=device)
    for layer in range(3):
        memory = storage.layer(layer)
        assert memory.shape == storage.layout.shape(6)
        assert memory.stride() == storage.layout.strides
        assert memory.dtype == getattr(torch, dtype)
        assert memory.device.type == storage.device.type == device
        assert not memory.float().any()
    assert storage.layer(0).data_ptr() % 64 == 0
    with pytest.raises(IndexError):
        storage.layer(3)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("halves", HALVES)
def test_the_halves_are_views_of_the_layer(halves: str, order: str):
    storage = make(halves=halves, order=order, dtype="int8")
    storage.write(1, torch.full((1, 2, 5), 2.0), torch.full((1, 2, 5), -3.0), torch.tensor([7]))
    k, v = storage.halves(1)
    assert k.shape == v.shape == ((6, 4, 2, 5) if order == "NHD" else (6, 2, 4, 5))
    assert (k.sum(), v.sum()) == (10 * 127, -10 * 127)
    if halves == "pair":
        assert k.is_contiguous()
        assert v.is_contiguous()
        for view in (storage.layer, storage.scales):
            with pytest.raises(ValueError, match="layout must have joint halves, got 'pair'; see `halves`"):
                view(1)
    else:
        assert torch.equal(storage.layer(1)[:, 0], k)
        assert torch.equal(storage.layer(1)[:, 1], v)


@pytest.mark.parametrize("order", ORDERS)
def test_every_head_of_a_token_has_its_own_scale(order: str):
    storage = make(order=order, dtype="int8")
    k = torch.tensor([[[1.27] * 5, [127.0] * 5]])
    storage.write(2, k, 2 * k, torch.tensor([7]))  # offset 3 of page 1
    scales = storage.scales(2)
    assert scales.is_contiguous()
    assert scales.shape == ((6, 2, 4, 2) if order == "NHD" else (6, 2, 2, 4))
    of_token = scales[1, :, 3] if order == "NHD" else scales[1, :, :, 3]
    assert torch.allclose(of_token, torch.tensor([[0.01, 1.0], [0.02, 2.0]]))
    assert scales.count_nonzero() == 4
    codes = storage.layer(2) * scales[..., None]
    assert torch.allclose(codes[1, 0, 3] if order == "NHD" else codes[1, 0, :, 3], k[0])


def test_only_int8_has_scales():
    with pytest.raises(ValueError, match="layout must be int8 to have scales, got float8_e5m2"):
        make(dtype="float8_e5m2").scales(0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", ORDERS)
def test_keys_and_values_may_be_views(order: str, device: str):
    storage = make(order=order, device=device)
    qkv = torch.randn(3, 5, 6, device=device)  # [tokens, head_dim, q and k and v heads], as a fused projection gives
    k, v = qkv.transpose(1, 2)[:, 2:4], qkv.transpose(1, 2)[:, 4:]
    storage.write(1, k, v, torch.tensor([23, 0, 9], device=device))
    memory = storage.layer(1)
    page = memory[5] if order == "NHD" else memory[5].transpose(1, 2)
    assert torch.equal(page[0, 3], k[0])
    assert torch.equal(page[1, 3], v[0])


@pytest.mark.parametrize("order", ORDERS)
def test_memory_is_shared_with_numpy(order: str):
    storage = make(order=order)
    view = storage.layer(2).numpy()
    storage.write(2, torch.ones(1, 2, 5), torch.ones(1, 2, 5), torch.tensor([0]))
    assert view.sum() == 20


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("slot", [-25, -24, -1, 24, 25])
def test_slots_outside_the_pool_are_refused_and_nothing_is_written(order: str, slot: int):
    storage = make(order=order, dtype="int8")
    with pytest.raises(IndexError, match=re.escape(f"slots must be in [0, 24), got {slot}")):
        storage.write(0, torch.ones(2, 2, 5), torch.ones(2, 2, 5), torch.tensor([3, slot]))
    with pytest.raises(IndexError, match=re.escape(f"slots must be in [0, 24), got {slot}")):
        storage.read(0, torch.tensor([3, slot]))
    assert not storage.layer(0).any()
    assert not storage.scales(0).any()


@pytest.mark.parametrize("order", ORDERS)
def test_shapes_that_do_not_match_are_refused(order: str):
    storage = make(order=order)
    fits, slots = torch.ones(2, 2, 5), torch.tensor([0, 1])
    for wrong in (torch.ones(1, 2, 5), torch.ones(2, 1, 10), torch.ones(2, 10)):
        with pytest.raises(ValueError, match=r"k and v must have shape \(2, 2, 5\), got"):
            storage.write(0, wrong, fits, slots)
        with pytest.raises(ValueError, match=r"k and v must have shape \(2, 2, 5\), got"):
            storage.write(0, fits, wrong, slots)
    with pytest.raises(ValueError, match="num_pages must be >= 1, got 0"):
        make(num_pages=0)


def test_memory_must_match_the_layout():
    layout = make_layout()
    memory = allocate(layout, 6)
    with pytest.raises(ValueError, match="memory must have"):
        KVStorage(layout, 7, memory=memory)
    with pytest.raises(ValueError, match="memory must have"):
        KVStorage(make_layout(order="HND"), 6, memory=memory)
    with pytest.raises(ValueError, match="memory must have"):
        KVStorage(make_layout(num_layers=2), 6, memory=memory)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", ORDERS)
def test_pages_are_copied_zeroed_and_summed(order: str, device: str):
    storage = make(order=order, device=device, dtype="int8")
    k, v = torch.randn(2, 4, 2, 5, device=device)
    storage.write(1, k, v, torch.arange(8, 12, device=device))
    storage.copy_pages(torch.tensor([2], device=device), torch.tensor([0], device=device))
    for copied, original in zip(
        storage.read(1, torch.arange(4, device=device)),
        storage.read(1, torch.arange(8, 12, device=device)),
        strict=True,
    ):
        assert torch.equal(copied, original)
        assert copied.any()
    assert storage.checksum(0) == storage.checksum(2) != storage.checksum(1)
    storage.zero_pages(torch.tensor([2], device=device))
    assert storage.checksum(2) == storage.checksum(1)
