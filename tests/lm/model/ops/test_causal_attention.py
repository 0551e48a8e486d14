"""Causal attention equals the plain reference, forward and backward."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lm.model.ops.attention_form import reference_attention, sdpa_attention
from lm.model.ops.causal_attention import blocked_causal_attention, causal_attention
from tests.helpers.examples import examples
from tests.helpers.tensors import assert_equal_with_gradients, widths


@examples(60)
@given(
    heads=st.integers(1, 5),
    length=st.integers(1, 40),
    width=widths,
    block_queries=st.sampled_from([1, 7, 256]),
    block_scores=st.sampled_from([1, 500, 1 << 19]),
    seed=st.integers(0, 99),
)
def test_blocked_attention_equals_reference(
    heads: int, length: int, width: int, block_queries: int, block_scores: int, seed: int
) -> None:
    torch.manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm.model.ops.causal_attention._BLOCK_QUERIES", block_queries)
        patch.setattr("lm.model.ops.causal_attention._BLOCK_SCORES", block_scores)
        assert_equal_with_gradients(
            blocked_causal_attention, reference_attention, *torch.randn(3, heads, length, width)
        )


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 70, 300])
def test_bfloat16_attention_is_as_exact_as_torch(kv_heads: int, length: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, length, n, 16, dtype=torch.bfloat16).transpose(1, 2) for n in (4, kv_heads, kv_heads))
    grad_out = torch.randn(q.shape, dtype=torch.bfloat16)

    def output_and_gradients(attention: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.to(dtype).detach().requires_grad_() for x in (q, k, v)]
        out = attention(*inputs)
        return [out, *torch.autograd.grad(out, inputs, grad_out.to(dtype))]

    results = output_and_gradients(causal_attention, torch.bfloat16)
    torch_results = output_and_gradients(sdpa_attention, torch.bfloat16)
    exact_results = output_and_gradients(reference_attention, torch.float64)
    for result, torch_result, exact in zip(results, torch_results, exact_results, strict=True):
        assert result.dtype == torch.bfloat16 and result.shape == exact.shape
        assert (result - exact).norm() < 2 * (torch_result - exact).norm() + 1e-2


@pytest.mark.slow
def test_compiled_attention_has_the_same_gradients() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 70, 16, dtype=torch.bfloat16).requires_grad_().unbind()
    eager, compiled = (attention(q, k, v) for attention in (causal_attention, torch.compile(causal_attention)))
    torch.testing.assert_close(compiled, eager)
    eager_gradients, compiled_gradients = (
        torch.autograd.grad(out.float().square().sum(), (q, k, v)) for out in (eager, compiled)
    )
    torch.testing.assert_close(compiled_gradients, eager_gradients)
