"""Random tensors, hypothesis strategies for them, and comparison of two functions with their gradients."""

from collections.abc import Callable

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

FEW_EXAMPLES = settings(deadline=None, max_examples=25)
seeds = st.integers(0, 2**32 - 1)
shapes = st.lists(st.integers(1, 4), max_size=3).map(tuple)
row_counts = st.sampled_from([1, 2, 63, 64, 65, 130])  # oneDNN multiplies 64 rows and more
widths = st.sampled_from([1, 2, 8, 31, 40])


def random_normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Standard normal numbers times ``scale``, the same for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def dequantize(weight: Tensor, scale: Tensor) -> Tensor:
    """Invert :func:`lm.inference.runners.cpu_layers.quantize`, up to rounding by half of a scale."""
    return weight * scale[:, None]


def assert_equal_with_gradients(
    function: Callable[..., Tensor], reference: Callable[..., Tensor], *inputs: Tensor
) -> None:
    """Check that the outputs and the gradients of both functions are equal. The reference computes in float64."""
    arguments = [x.detach().clone().requires_grad_() for x in inputs]
    exact_arguments = [x.detach().double().requires_grad_() for x in inputs]
    out, exact = function(*arguments), reference(*exact_arguments)
    assert out.dtype == inputs[0].dtype and out.shape == exact.shape
    torch.testing.assert_close(out, exact.to(out.dtype), rtol=1e-5, atol=1e-5)
    grad_out = torch.randn_like(exact)
    gradients = torch.autograd.grad(out, arguments, grad_out.to(out.dtype))
    exact_gradients = torch.autograd.grad(exact, exact_arguments, grad_out)
    for gradient, exact_gradient in zip(gradients, exact_gradients, strict=True):
        torch.testing.assert_close(gradient, exact_gradient.to(gradient.dtype), rtol=1e-4, atol=1e-5)
