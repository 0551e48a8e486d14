"""The fused RMSNorm equals its formula, forward and backward."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.model.ops.rms_norm import rms_norm
from tests.helpers.examples import examples
from tests.helpers.reference_model import reference_rms_norm
from tests.helpers.tensors import assert_equal_with_gradients, row_counts, widths


@examples(40)
@given(rows=row_counts, width=widths, seed=st.integers(0, 99))
def test_rms_norm_equals_formula(rows: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    x, weight = torch.randn(2, rows, width) * 3, torch.randn(width)
    assert_equal_with_gradients(
        lambda x, w: rms_norm(x, w, 1e-5), lambda x, w: reference_rms_norm(x, w, 1e-5), x, weight
    )


def test_one_row_without_batch_dimensions() -> None:
    assert_equal_with_gradients(
        lambda x, w: rms_norm(x, w, 1e-5), lambda x, w: reference_rms_norm(x, w, 1e-5), torch.randn(8), torch.randn(8)
    )


def test_result_is_the_same_without_gradients() -> None:
    x, weight = torch.randn(3, 70, 16), torch.randn(16)
    expected = rms_norm(x, weight, 1e-5)
    with torch.no_grad():
        torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected)
