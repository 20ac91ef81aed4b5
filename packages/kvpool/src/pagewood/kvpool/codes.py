"""Numbers to the codes that a page holds, and back."""

import torch

_LARGEST_CODE = 127


def encode(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `values` in a floating dtype; what is too large for an fp8 becomes its largest number, with its sign."""
    if dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        values = values.clamp(-largest, largest)
    return values.to(dtype)


def quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 codes and the scale of each row, such that `code * scale` is off by at most half a scale.

    Args:
        values: `[..., dim]`, any floating dtype. A row with a NaN or an infinity does not come back finite.

    Returns:
        `[..., dim] int8`, in [-127, 127], and `[...] float32`, the row's largest magnitude / 127.
    """
    values = values.float()
    scales = values.abs().amax(-1) / _LARGEST_CODE
    divisors = torch.where(scales > 0, scales, 1.0)
    codes = (values / divisors[..., None]).round_()
    # The scale of a row of denormal numbers is too coarse for its largest to be 127.
    return codes.clamp_(-_LARGEST_CODE, _LARGEST_CODE).to(torch.int8), scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return `[..., dim] float32`, of codes `[..., dim] int8` and scales `[...] float32`."""
    return codes.float() * scales[..., None]
