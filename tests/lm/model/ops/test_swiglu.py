"""The fused gates of SwiGLU and GeGLU equal their formulas, forward and backward."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lm.model.functional import silu
from lm.model.ops.swiglu import geglu, swiglu
from tests.helpers.examples import examples
from tests.helpers.tensors import assert_equal_with_gradients, row_counts, widths

FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "swiglu": (swiglu, silu),
    "geglu": (geglu, partial(F.gelu, approximate="tanh")),
}


@pytest.mark.parametrize("form", FORMS)
@examples(40)
@given(rows=row_counts, width=widths, block_elements=st.sampled_from([1, 64, 1 << 18]), seed=st.integers(0, 99))
def test_the_product_equals_its_formula(form: str, rows: int, width: int, block_elements: int, seed: int) -> None:
    fused, activation = FORMS[form]
    torch.manual_seed(seed)
    gate, up = torch.randn(2, 2, rows, width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm.model.ops.swiglu._BLOCK_ELEMENTS", block_elements)
        assert_equal_with_gradients(fused, lambda gate, up: activation(gate) * up, gate, up)
    with torch.no_grad():
        torch.testing.assert_close(fused(gate, up), activation(gate) * up)


def test_swiglu_accepts_transposed_inputs() -> None:
    gate, up = (torch.randn(8, 70, requires_grad=True) for _ in range(2))
    gradients = torch.autograd.grad(swiglu(gate.T, up.T).sum(), (gate, up))
    torch.testing.assert_close(gradients, torch.autograd.grad((silu(gate.T) * up.T).sum(), (gate, up)))
