# pyright: basic
# torch is optional here, so it comes from importorskip, which has no types.
import os
import re
from pathlib import Path

import pytest

from pagewood.kvpool import JointLayout, MultiHeadLayout, PageArray, PageLayout, StateLayout

torch = pytest.importorskip("torch")

from pagewood.kvpool.memory import (  # noqa: E402
    PageMemory,
    SharedBytes,
    allocate,
    allocate_joint,
    joined,
    shared_size,
)

HEADS = MultiHeadLayout(num_layers=2, num_kv_heads=2, head_dim=5, page_size=3, dtype="int8")
PAIR = MultiHeadLayout(num_layers=3, num_kv_heads=1, head_dim=7, page_size=3, dtype="bfloat16", halves="pair")
STATE = StateLayout(
    num_layers=2,
    arrays=(
        PageArray(name="conv", dtype="bfloat16", shape=(7, 3)),
        PageArray(name="ssm", dtype="float32", shape=(2, 5)),
    ),
)
LAYOUTS = [HEADS, PAIR, STATE]


def shared(layout: PageLayout, num_pages: int) -> PageMemory:
    """Return memory of the layout as one of three parts of a page."""
    return allocate_joint(JointLayout(parts=(PAIR, layout, STATE)), num_pages)[1][1]


def fill(memory: PageMemory) -> list:
    """Write random bytes; return copies of them."""
    blocks = [block for layer in range(memory.layout.num_layers) for block in memory.blocks(layer)]
    for block in blocks:
        block.copy_(torch.randint(0, 256, block.shape, dtype=torch.uint8))
    return [block.clone() for block in blocks]


def contents(memory: PageMemory) -> list:
    return [block for layer in range(memory.layout.num_layers) for block in memory.blocks(layer)]


@pytest.mark.parametrize("make", [allocate, shared])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_arrays_have_the_layouts_shapes_and_dtypes_and_start_as_zeros(layout: PageLayout, make):
    memory = make(layout, 4)
    assert memory.num_pages == 4
    for layer in range(layout.num_layers):
        for spec in layout.arrays:
            array = memory.array(layer, spec.name)
            assert array.shape == (4, *spec.shape)
            assert array.dtype == getattr(torch, spec.dtype)
            assert array.stride()[1:] == spec.strides
            assert array.data_ptr() % 64 == 0
            assert not array.view(torch.uint8).any()
    with pytest.raises(IndexError):
        memory.array(layout.num_layers, layout.arrays[0].name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_of_one_layout_is_contiguous_and_has_the_stated_size(layout: PageLayout):
    memory = allocate(layout, 4)
    assert sum(block.numel() for block in contents(memory)) == 4 * layout.bytes_per_page
    assert all(block.is_contiguous() for block in contents(memory))


@pytest.mark.parametrize("make", [allocate, shared])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_arrays_and_blocks_are_the_same_memory_and_do_not_overlap(layout: PageLayout, make):
    memory = make(layout, 3)
    value = 0
    for layer in range(layout.num_layers):
        for block in memory.blocks(layer):
            value += 1
            block.fill_(value)
    value = 0
    for layer in range(layout.num_layers):
        for spec in layout.arrays:
            value += 1
            assert (memory.array(layer, spec.name).contiguous().view(torch.uint8) == value).all()


@pytest.mark.parametrize("make", [allocate, shared])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copy_pages_reads_all_before_it_writes(layout: PageLayout, make):
    memory = make(layout, 6)
    before = fill(memory)
    memory.copy_pages(torch.tensor([0, 1, 1]), torch.tensor([1, 0, 5], dtype=torch.int32))
    for old, new in zip(before, contents(memory), strict=True):
        assert torch.equal(new, old[[1, 0, 2, 3, 4, 1]])
    with pytest.raises(ValueError, match=re.escape("src and dst must have the same shape, got (1,) and (2,)")):
        memory.copy_pages(torch.tensor([0]), torch.tensor([1, 2]))
    for wrong in (-1, 6):
        with pytest.raises(IndexError):
            memory.copy_pages(torch.tensor([0]), torch.tensor([wrong]))


@pytest.mark.parametrize("make", [allocate, shared])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_zero_pages_leaves_the_other_pages_unchanged(layout: PageLayout, make):
    memory = make(layout, 4)
    before = fill(memory)
    memory.zero_pages(torch.tensor([1, 3]))
    for old, new in zip(before, contents(memory), strict=True):
        assert not new[[1, 3]].any()
        assert torch.equal(new[[0, 2]], old[[0, 2]])
    for wrong in (-1, 4):
        with pytest.raises(IndexError):
            memory.zero_pages(torch.tensor([wrong]))


@pytest.mark.parametrize("make", [allocate, shared])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_touch_does_not_change_the_contents(layout: PageLayout, make):
    memory = make(layout, 4)
    before = fill(memory)
    memory.touch()
    assert all(torch.equal(old, new) for old, new in zip(before, contents(memory), strict=True))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc to read the resident memory from")
def test_memory_is_resident_after_touch():
    layout = MultiHeadLayout(num_layers=1, num_kv_heads=2, head_dim=64, page_size=16)
    memory = allocate(layout, (96 << 20) // layout.bytes_per_page)  # large: fresh from the system
    before = resident_bytes()
    memory.touch()
    assert resident_bytes() - before > 80 << 20


@pytest.mark.parametrize("make", [allocate, shared])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checksum_covers_every_byte_of_its_page_and_nothing_else(layout: PageLayout, make):
    memory = make(layout, 3)
    fill(memory)
    memory.copy_pages(torch.tensor([0]), torch.tensor([1]))
    expected = memory.checksum(0)
    assert memory.checksum(1) == expected
    for block in contents(memory):
        for position in (0, block.shape[1] - 1):
            block[1, position] ^= 1
            assert memory.checksum(1) != expected
            assert memory.checksum(0) == expected
            block[1, position] ^= 1
    assert memory.checksum(1) == expected


@pytest.mark.parametrize("num_pages", [0, -1])
def test_a_pool_must_have_at_least_one_page(num_pages: int):
    with pytest.raises(ValueError, match=f"num_pages must be >= 1, got {num_pages}"):
        allocate(HEADS, num_pages)
    with pytest.raises(ValueError, match=f"num_pages must be >= 1, got {num_pages}"):
        allocate_joint(JointLayout(parts=(HEADS,)), num_pages)


def resident_bytes() -> int:
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return num_pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the resident size from /proc")
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_page_takes_memory_only_when_it_is_first_written(is_shared: bool):
    layout = MultiHeadLayout(num_layers=2, num_kv_heads=8, head_dim=128, page_size=16)
    num_pages = layout.pages_for(2**30)
    before = resident_bytes()
    memory = allocate_joint(JointLayout(parts=(layout,)), num_pages)[1][0] if is_shared else allocate(layout, num_pages)
    memory.array(1, "kv")[-1] = 1
    assert resident_bytes() - before < 2**26
    assert memory.array(1, "kv")[-1].sum() == 2 * 8 * 128 * 16


def test_a_joint_page_is_the_pages_of_its_parts():
    layout = JointLayout(parts=(HEADS, PAIR, STATE))
    whole, parts = allocate_joint(layout, 5)
    assert whole.layout.bytes_per_page == sum(part.layout.bytes_per_page for part in parts)
    assert sum(array.num_bytes for array in layout.arrays) == layout.bytes_per_page
    assert layout.pages_for(3 * layout.bytes_per_page + 1) == 3
    before = [block for part in parts for block in fill(part)]
    assert all(a.equal(b) for a, b in zip(contents(whole), before, strict=True))
    whole.copy_pages(torch.tensor([0, 1]), torch.tensor([4, 0]))
    for block, old in zip((block for part in parts for block in contents(part)), before, strict=True):
        assert block[4].equal(old[0])
        assert block[0].equal(old[1])
        assert block[1:4].equal(old[1:4])
    assert parts[1].array(2, "v").data_ptr() == whole.array(0, "1.2.v").data_ptr()
    with pytest.raises(ValueError, match="parts must not be empty"):
        JointLayout(parts=())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memories_that_cut_the_same_bytes_share_them(layout: PageLayout):
    joint = JointLayout(parts=(PAIR, layout, STATE))
    whole = torch.zeros(shared_size(joint, 5), dtype=torch.uint8)
    (one, parts), (other, _) = (allocate_joint(joint, 5, shared=SharedBytes(whole)) for _ in range(2))
    before = fill(one)
    assert all(map(torch.equal, contents(other), before))
    assert all(block.data_ptr() % 64 == 0 for part in parts for block in contents(part))
    with pytest.raises(ValueError, match=r"memory must have \d+ bytes, got 10"):
        allocate(layout, 5, shared=SharedBytes(whole[:10]))


def test_joined_memories_have_the_pages_of_all():
    memories = [allocate(layout, 3) for layout in (HEADS, HEADS)]
    expected = [block for memory in memories for block in fill(memory)]
    whole = joined(JointLayout(parts=(HEADS, HEADS)), memories)
    assert all(map(torch.equal, contents(whole), expected))
    assert whole.layout.bytes_per_page == 2 * HEADS.bytes_per_page
