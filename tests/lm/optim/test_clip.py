"""Gradient clipping against torch's."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.optim.clip import clip_grad_norm
from tests.helpers.optimizers import SHAPES, make_parameters, set_gradients
from tests.helpers.tensors import FEW_EXAMPLES


@FEW_EXAMPLES
@given(seed=st.integers(0, 10**6), max_norm=st.sampled_from([1e-3, 0.1, 1.0, 50.0, 1e6]), missing=st.booleans())
def test_clip_grad_norm_equals_torch(seed: int, max_norm: float, missing: bool) -> None:
    params, expected_params = make_parameters(SHAPES), make_parameters(SHAPES)
    set_gradients(params, seed, missing)
    set_gradients(expected_params, seed, missing)
    norm = clip_grad_norm(iter(params), max_norm)
    expected = torch.nn.utils.clip_grad_norm_(expected_params, max_norm)
    torch.testing.assert_close(norm, expected)
    for a, b in zip(params, expected_params, strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None and b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad)


def test_clip_grad_norm_by_hand() -> None:
    a, b = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    a.grad, b.grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert clip_grad_norm([a, b], 1.0).item() == 5.0
    torch.testing.assert_close(torch.cat([a.grad, b.grad]), torch.tensor([0.6, 0.8]))


def test_clip_does_not_change_small_gradients() -> None:
    p = torch.zeros(3, requires_grad=True)
    p.grad = torch.tensor([0.1, 0.2, 0.3])
    before = p.grad.clone()
    clip_grad_norm([p], 1.0)
    assert torch.equal(p.grad, before)


def test_clip_without_gradients() -> None:
    assert clip_grad_norm(make_parameters([(2, 2)]), 1.0).item() == 0.0
    assert clip_grad_norm([], 1.0).item() == 0.0
