"""The matrix product of linear layers equals the plain one, forward and backward."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.model.ops.linear import count_padding_rows, linear
from tests.helpers.examples import examples
from tests.helpers.tensors import assert_equal_with_gradients, row_counts, widths


@examples(40)
@given(rows=row_counts, width=widths, out=widths, seed=st.integers(0, 99))
def test_linear_equals_matrix_product(rows: int, width: int, out: int, seed: int) -> None:
    torch.manual_seed(seed)
    assert_equal_with_gradients(linear, lambda x, w: x @ w.T, torch.randn(2, rows, width), torch.randn(out, width))


def test_linear_accepts_transposed_input() -> None:
    x, weight = torch.randn(3, 8, 70).mT, torch.randn(5, 8)
    torch.testing.assert_close(linear(x, weight), x @ weight.T)


def test_padding_limits_the_number_of_sizes() -> None:
    sizes = sorted({rows + count_padding_rows(rows) for rows in range(1, 4097)})
    assert sizes[:16] == list(range(1, 17))
    assert len(sizes) == 16 + 8 * 8, "oneDNN caches memory for each size"
    assert all(0 <= count_padding_rows(rows) <= rows / 8 for rows in range(1, 4097))
