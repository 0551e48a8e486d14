"""Products of a few rows equal those in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lm.inference import cpu_decode
from lm.inference.cpu_decode import multiply_few_rows
from lm.inference.packed import PackedLinear
from tests.helpers.examples import examples


def check_product(weight: Tensor, rows: Tensor, scale: Tensor | None = None) -> None:
    out = multiply_few_rows(weight, rows, scale)
    assert out.dtype == rows.dtype and out.shape == (len(rows), len(weight))
    matrix, x = weight.double() if scale is None else weight.double() * scale.double()[:, None], rows.double()
    rounding = 2.0**-8 if rows.dtype == torch.bfloat16 else 1e-6
    bound = rounding * (x.abs() @ matrix.abs().T)
    assert ((out.double() - x @ matrix.T).abs() <= bound + 1e-30).all()


@examples(200)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
    rows=st.integers(1, 10),
    outputs=st.integers(1, 40),
    columns=st.integers(1, 200),
    is_scaled=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape(dtype: torch.dtype, rows: int, outputs: int, columns: int, is_scaled: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.int8:
        weight = torch.randint(-127, 128, (outputs, columns), generator=generator).to(dtype)
    else:
        weight = torch.randn(outputs, columns, generator=generator).to(dtype)
    x = torch.randn(rows, columns, generator=generator).to(torch.float32 if dtype == torch.int8 else dtype)
    check_product(weight, x, torch.rand(outputs, generator=generator) if is_scaled else None)


@pytest.mark.parametrize("rows", [1, 4, 5])
def test_threads_share_the_outputs(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_decode, "_MIN_BYTES_OF_PRODUCT", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for outputs in (1, 2, 3, 101):
        check_product(torch.randn(outputs, 70), torch.randn(rows, 70))


def test_rows_that_are_not_contiguous() -> None:
    check_product(torch.randn(5, 9), torch.randn(9, 3).T)
    check_product(torch.randn(5, 9), torch.randn(3, 18)[:, ::2])


@pytest.mark.parametrize("rows", [1, 4, 5])
def test_a_packed_matrix_without_its_plain_layout(rows: int) -> None:
    weight, x = torch.randn(40, 24), torch.randn(rows, 24)
    both, one = PackedLinear(weight), PackedLinear(weight, has_both=False)
    assert both.weight is not None and one.weight is None
    torch.testing.assert_close(one(x), both(x), atol=1e-5, rtol=1e-5)
