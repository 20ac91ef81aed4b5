# pyright: basic
# torch is optional here, so it comes from importorskip, which has no types.
import inspect
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewood.kvpool import JointLayout, LatentLayout, MultiHeadLayout

torch = pytest.importorskip("torch")

from pagewood.kvpool.latent_storage import LatentStorage  # noqa: E402
from pagewood.kvpool.memory import allocate, allocate_joint  # noqa: E402
from pagewood.kvpool.storage import KVStorage  # noqa: E402

DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"]
# The largest error of a number in (-4, 4): half a unit in the last place.
TOLERANCE = dict(zip(DTYPES, [0, 2**-10, 2**-7, 2**-3, 2**-2, 4 / 254 + 1e-6], strict=True))


def make(dtype: str, *, page_size: int = 4, num_pages: int = 6, is_shared: bool = False) -> LatentStorage:
    layout = LatentLayout(num_layers=2, latent_dim=6, rope_dim=3, page_size=page_size, dtype=dtype)
    if not is_shared:
        return LatentStorage(layout, num_pages)
    memory = allocate_joint(JointLayout(parts=(layout, layout)), num_pages)[1][1]
    return LatentStorage(layout, num_pages, memory=memory)


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=20)
@given(data=st.data())
def test_read_returns_what_was_written(dtype: str, is_shared: bool, data: st.DataObject):
    page_size = data.draw(st.integers(1, 5))
    storage = make(dtype, page_size=page_size, is_shared=is_shared)
    expected = torch.zeros(2, 6 * page_size, 9)
    for _ in range(3):
        layer = data.draw(st.integers(0, 1))
        slots = data.draw(st.lists(st.integers(0, 6 * page_size - 1), unique=True))
        latents = torch.rand(len(slots), 9) * 8 - 4
        storage.write(layer, latents, torch.tensor(slots, dtype=torch.int32))
        expected[layer, slots] = latents
    for layer in range(2):
        read = storage.read(layer, torch.arange(6 * page_size))
        assert torch.allclose(read, expected[layer], atol=TOLERANCE[dtype], rtol=0)


def test_numbers_out_of_range_become_the_largest_of_fp8():
    storage = make("float8_e4m3fn")
    storage.write(0, torch.full((1, 9), -1e6), torch.tensor([3]))
    assert (storage.read(0, torch.tensor([3])) == -448).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_have_the_shapes_of_the_layout(dtype: str):
    storage = make(dtype)
    storage.write(1, torch.randn(1, 9), torch.tensor([9]))
    assert storage.layer(1).shape == (6, 4, 9)
    assert storage.layer(1).is_contiguous()
    assert storage.layer(1).dtype == getattr(torch, dtype)
    compressed, rotated = storage.parts(1)
    assert (compressed.shape, rotated.shape) == ((6, 4, 6), (6, 4, 3))
    parts = [compressed[2, 1].float(), rotated[2, 1].float()]
    if dtype == "int8":
        parts = [part * scale for part, scale in zip(parts, storage.scales(1)[2, 1], strict=True)]
    both = torch.cat(parts)
    assert torch.equal(both, storage.read(1, torch.tensor([9]))[0])
    assert both.any()


def test_a_page_has_the_bytes_of_its_latents():
    layout = LatentLayout(num_layers=2, latent_dim=6, rope_dim=3, page_size=4, dtype="bfloat16")
    assert layout.bytes_per_page == 2 * 4 * 9 * 2
    assert layout.pages_for(10 * layout.bytes_per_page + 1) == 10
    coded = LatentLayout(num_layers=2, latent_dim=6, rope_dim=3, page_size=4, dtype="int8")
    assert coded.bytes_per_page == 2 * 4 * (9 + 2 * 4)


def test_parts_of_a_latent_have_scales_of_their_own():
    storage = make("int8")
    latents = torch.cat([torch.full((1, 6), 100.0), torch.full((1, 3), 0.01)], -1)
    storage.write(0, latents, torch.tensor([5]))
    assert torch.allclose(storage.read(0, torch.tensor([5])), latents)
    with pytest.raises(ValueError, match="layout must be int8 to have scales, got float32"):
        make("float32").scales(0)


def test_bad_input_is_refused():
    storage = make("float32")
    slots = torch.tensor([0, 1])
    with pytest.raises(ValueError, match=re.escape("latents must have shape (2, 9), got (2, 8)")):
        storage.write(0, torch.ones(2, 8), slots)
    for wrong in (-1, 24):
        with pytest.raises(IndexError, match=re.escape(f"slots must be in [0, 24), got {wrong}")):
            storage.write(0, torch.ones(2, 9), torch.tensor([0, wrong]))
        with pytest.raises(IndexError, match=re.escape(f"slots must be in [0, 24), got {wrong}")):
            storage.read(0, torch.tensor([0, wrong]))
    assert not storage.layer(0).any()
    with pytest.raises(ValueError, match="num_pages must be >= 1, got 0"):
        make("float32", num_pages=0)


def test_memory_of_heads_is_not_taken_for_latents():
    """The same number of bytes, but another array."""
    storage = make("float32")
    other = allocate(MultiHeadLayout(num_layers=2, num_kv_heads=1, head_dim=9, page_size=4, halves="pair"), 6)
    with pytest.raises(ValueError, match="memory must have"):
        LatentStorage(storage.layout, 6, memory=other)
    with pytest.raises(ValueError, match="memory must have"):
        LatentStorage(storage.layout, 5, memory=storage.memory)


def test_it_is_made_with_the_arguments_of_memory_of_heads():
    latents, heads = (inspect.signature(one).parameters for one in (LatentStorage, KVStorage))
    assert list(latents) == list(heads)
    assert [(one.kind, one.default) for one in latents.values()] == [(one.kind, one.default) for one in heads.values()]


def test_pages_are_copied_zeroed_and_summed():
    storage = make("bfloat16")
    storage.write(1, torch.randn(4, 9), torch.arange(8, 12))
    memory = storage.memory
    memory.copy_pages(torch.tensor([2]), torch.tensor([0]))
    assert torch.equal(storage.read(1, torch.arange(4)), storage.read(1, torch.arange(8, 12)))
    assert memory.checksum(0) == memory.checksum(2) != memory.checksum(1)
    memory.zero_pages(torch.tensor([2]))
    assert memory.checksum(2) == memory.checksum(1)
    assert storage.device.type == "cpu"
