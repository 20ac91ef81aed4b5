"""Where slots lie in an array whose first axes are page and offset."""

import torch


def locate(slots: torch.Tensor, *, page_size: int, num_pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return page and offset of each slot, `[n] int64` both; the result of a wrong slot on a GPU is an invalid page.

    Args:
        slots: `[n] int64` (or int32), `page * page_size + offset`.
        page_size: Positions in a page.
        num_pages: Pages of the pool.

    Raises:
        IndexError: A slot lies outside the pool; on a CPU only, for a GPU would have to be waited for.
    """
    slots = slots.long()
    if slots.device.type != "cpu":
        # An index may count from the end; a negative slot must not.
        slots = slots.masked_fill(slots < 0, num_pages * page_size)
    elif len(slots):
        least, most = (int(bound) for bound in slots.aminmax())
        if least < 0 or most >= num_pages * page_size:
            raise IndexError(f"slots must be in [0, {num_pages * page_size}), got {least if least < 0 else most}")
    pages = slots // page_size
    return pages, slots - pages * page_size
