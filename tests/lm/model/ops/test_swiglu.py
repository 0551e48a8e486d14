"""The fused gate of SwiGLU equals its formula, forward and backward."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from lm.model.functional import silu
from lm.model.ops.swiglu import geglu, swiglu
from tests.helpers.examples import examples
from tests.helpers.tensors import assert_equal_with_gradients, row_counts, widths


@examples(40)
@given(rows=row_counts, width=widths, block_elements=st.sampled_from([1, 64, 1 << 18]), seed=st.integers(0, 99))
def test_swiglu_equals_formula(rows: int, width: int, block_elements: int, seed: int) -> None:
    torch.manual_seed(seed)
    gate, up = torch.randn(2, 2, rows, width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm.model.ops.swiglu._BLOCK_ELEMENTS", block_elements)
        assert_equal_with_gradients(swiglu, lambda gate, up: silu(gate) * up, gate, up)


@examples(40)
@given(rows=row_counts, width=widths, block_elements=st.sampled_from([1, 64, 1 << 18]), seed=st.integers(0, 99))
def test_geglu_equals_formula(rows: int, width: int, block_elements: int, seed: int) -> None:
    torch.manual_seed(seed)
    gate, up = torch.randn(2, 2, rows, width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm.model.ops.swiglu._BLOCK_ELEMENTS", block_elements)
        assert_equal_with_gradients(geglu, lambda gate, up: F.gelu(gate, approximate="tanh") * up, gate, up)
    with torch.no_grad():
        torch.testing.assert_close(geglu(gate, up), F.gelu(gate, approximate="tanh") * up)


def test_swiglu_accepts_transposed_inputs() -> None:
    gate, up = (torch.randn(8, 70, requires_grad=True) for _ in range(2))
    gradients = torch.autograd.grad(swiglu(gate.T, up.T).sum(), (gate, up))
    torch.testing.assert_close(gradients, torch.autograd.grad((silu(gate.T) * up.T).sum(), (gate, up)))


def test_result_is_the_same_without_gradients() -> None:
    gate, up = torch.randn(2, 3, 70, 16)
    expected = swiglu(gate, up)
    with torch.no_grad():
        torch.testing.assert_close(swiglu(gate, up), expected)
