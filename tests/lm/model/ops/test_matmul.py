"""The matrix product of linear layers equals the plain one, forward and backward."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.hardware.device import prefers_onednn
from lm.model.ops.matmul import count_padding_rows, linear
from tests.helpers.examples import examples
from tests.helpers.tensors import assert_equal_with_gradients, row_counts, widths


@examples(40)
@given(rows=row_counts, width=widths, out=widths, on_onednn=st.booleans(), seed=st.integers(0, 99))
def test_linear_equals_matrix_product(rows: int, width: int, out: int, on_onednn: bool, seed: int) -> None:
    torch.manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm.model.ops.matmul.PREFERS_ONEDNN", on_onednn and torch.backends.mkldnn.is_available())
        assert_equal_with_gradients(linear, lambda x, w: x @ w.T, torch.randn(2, rows, width), torch.randn(out, width))


@pytest.mark.skipif(
    not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()), reason="torch lacks MKL or oneDNN"
)
@pytest.mark.parametrize(
    ("cpu_name", "expected"), [("Intel Xeon", False), ("AMD EPYC 7R13", True), ("Neoverse V2", True), ("", True)]
)
def test_intels_own_library_multiplies_on_its_cpus(cpu_name: str, expected: bool) -> None:
    assert prefers_onednn(cpu_name) == expected


def test_linear_accepts_transposed_input() -> None:
    x, weight = torch.randn(3, 8, 70).mT, torch.randn(5, 8)
    torch.testing.assert_close(linear(x, weight), x @ weight.T)


def test_padding_limits_the_number_of_sizes() -> None:
    sizes = sorted({rows + count_padding_rows(rows) for rows in range(1, 4097)})
    assert sizes[:16] == list(range(1, 17))
    assert len(sizes) == 16 + 8 * 8, "oneDNN caches memory for each size"
    assert all(0 <= count_padding_rows(rows) <= rows / 8 for rows in range(1, 4097))
