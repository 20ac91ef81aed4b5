# pyright: basic
# torch is optional here, so it comes from importorskip, which has no types.
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from pagewood.kvpool.codes import dequantise, encode, quantise  # noqa: E402

numbers = st.floats(-(2.0**99), 2.0**99, width=32)
rows = st.lists(st.lists(numbers, min_size=4, max_size=4), min_size=1, max_size=5)


@given(rows)
def test_a_code_times_its_scale_is_off_by_half_a_scale_at_most(rows: list[list[float]]):
    values = torch.tensor(rows)
    codes, scales = quantise(values)
    assert (codes.dtype, scales.dtype) == (torch.int8, torch.float32)
    assert scales.shape == values.shape[:-1]
    assert codes.min() >= -127
    error = (dequantise(codes, scales).double() - values.double()).abs()
    limit = scales.double()[:, None] * 0.5001 + torch.finfo(torch.float32).tiny
    assert (error <= limit).all()


def test_the_largest_number_of_a_row_is_kept_and_zeros_stay_zeros():
    values = torch.tensor([[-3.0, 1.5, 0.0], [0.0, 0.0, 0.0], [1e-6, 1e-6, -1e-6]])
    codes, scales = quantise(values)
    assert codes.tolist() == [[-127, 64, 0], [0, 0, 0], [127, 127, -127]]
    assert torch.allclose(scales, torch.tensor([3.0, 0.0, 1e-6]) / 127)


def test_a_code_never_wraps_around():
    codes, _ = quantise(torch.tensor([[190 * 2.0**-149, -190 * 2.0**-149]]))
    assert codes.tolist() == [[127, -127]]


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_does_not_become_finite(wrong: float):
    codes, scales = quantise(torch.tensor([[wrong, 1.0], [1.0, 2.0]]))
    assert dequantise(codes, scales).isfinite().all(-1).tolist() == [False, True]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_quantised_as_float32(dtype):
    values = torch.randn(5, 8).to(dtype)
    for got, expected in zip(quantise(values), quantise(values.float()), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(("name", "largest"), [("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0)])
def test_fp8_saturates(name: str, largest: float):
    values = torch.tensor([1e9, -1e9, largest, torch.inf, -torch.inf, 0.5, torch.nan])
    codes = encode(values, getattr(torch, name)).float()
    assert codes[:6].tolist() == [largest, -largest, largest, largest, -largest, 0.5]
    assert codes[6].isnan()


def test_larger_types_do_not_saturate():
    assert encode(torch.tensor([1e9]), torch.float16).isinf()
    assert encode(torch.tensor([1e9]), torch.float32).tolist() == [1e9]
