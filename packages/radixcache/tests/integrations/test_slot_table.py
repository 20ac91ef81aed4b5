# pyright: basic
# (torch is not a dependency of this package)
"""The table of slots gives each page a number of its own, whatever was added and removed before."""

import random

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="integrations with engines that use torch need it")

from pagewood.radixcache.integrations.slot_table import SlotTable  # noqa: E402


@pytest.mark.parametrize("page_size", [1, 3])
def test_pages_keep_their_slots(page_size: int) -> None:
    rng = random.Random(page_size)
    table = SlotTable(2, page_size, dtype=torch.int64, device=torch.device("cpu"))
    held: dict[int, list[int]] = {}
    for _ in range(200):
        if rng.random() < 0.6:
            slots = torch.randint(0, 1000, (rng.randrange(5) * page_size,), dtype=torch.int32)
            numbers = table.add(slots)
            assert not set(numbers.tolist()) & held.keys()
            held |= dict(zip(numbers.tolist(), slots.reshape(-1, page_size).tolist(), strict=True))
        elif held:
            gone = rng.sample(sorted(held), rng.randrange(len(held) + 1))
            table.remove(np.array(gone, np.int32))
            for number in gone:
                del held[number]
        chosen = rng.sample(sorted(held), len(held))
        assert table.slots(np.array(chosen, np.int32)).tolist() == [slot for n in chosen for slot in held[n]]
        assert table.num_used == len(held)
    assert table.slots(np.empty(0, np.int32)).dtype == torch.int64
