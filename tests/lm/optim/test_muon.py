"""Muon against a written-out loop, and the singular values of its updates."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.optim.muon import Muon, orthogonalize
from lm.optim.schedules import lr_cosine_schedule
from tests.helpers.optimizers import assert_all_close, make_parameters, set_gradients
from tests.helpers.tensors import FEW_EXAMPLES


@FEW_EXAMPLES
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 3),
    size=st.sampled_from([(64, 16), (16, 64), (96, 40), (40, 96), (8, 3), (1, 5)]),
    scale=st.sampled_from([1e-4, 1.0, 1e4]),
    product_dtype=st.sampled_from([None, torch.bfloat16]),
)
def test_orthogonalize_brings_singular_values_near_one(
    seed: int, count: int, size: tuple[int, int], scale: float, product_dtype: torch.dtype | None
) -> None:
    """Singular values end in [0.6, 1.3]. Singular vectors stay: in their bases the result is nearly diagonal."""
    matrices = torch.randn(count, *size, generator=torch.Generator().manual_seed(seed)) * scale
    result = orthogonalize(matrices, product_dtype)
    assert result.shape == matrices.shape and result.dtype == matrices.dtype
    u, s, vh = torch.linalg.svd(matrices.double(), full_matrices=False)
    inner = u.mT @ result.double() @ vh.mT
    values = inner.diagonal(dim1=-2, dim2=-1)
    strong = s > 0.05 * s.amax(-1, keepdim=True)  # five steps do not lift values near zero
    assert values[strong].min() > 0.6 and values[strong].max() < 1.3
    assert torch.linalg.svdvals(result.double()).max() < 1.3
    assert (inner - torch.diag_embed(values)).abs().max() < 0.1


def test_orthogonalize_lifts_a_wide_spectrum() -> None:
    """With condition number 30 the largest and the smallest singular values end up similar."""
    generator = torch.Generator().manual_seed(0)
    u, _ = torch.linalg.qr(torch.randn(32, 32, generator=generator))
    v, _ = torch.linalg.qr(torch.randn(48, 32, generator=generator))
    matrix = u @ torch.diag(torch.logspace(0, -1.5, 32)) @ v.T
    values = torch.linalg.svdvals(orthogonalize(matrix[None])[0])
    assert values.min() > 0.6 and values.max() < 1.3


def test_orthogonalize_of_zeros_is_zero() -> None:
    assert torch.equal(orthogonalize(torch.zeros(2, 3, 5)), torch.zeros(2, 3, 5))


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize(("product_dtype", "tolerance"), [(None, 1e-5), (torch.bfloat16, 1e-3)])
def test_muon_equals_written_out_loop(missing: bool, product_dtype: torch.dtype | None, tolerance: float) -> None:
    """Momentum, Nesterov, scale and decay, matrix by matrix. Products of stacked matrices may round differently."""
    shapes = [(6, 4), (4, 6), (6, 4), (5, 5)]
    lr, beta, decay = 0.02, 0.9, 0.1
    params = make_parameters(shapes)
    optimizer = Muon(params, lr=lr, momentum=beta, weight_decay=decay, product_dtype=product_dtype)
    expected = [p.detach().clone() for p in params]
    momenta = [torch.zeros(shape) for shape in shapes]
    for step in range(10):
        set_gradients(params, step, missing)
        for n, p in enumerate(params):
            if p.grad is None:
                continue
            momenta[n] = beta * momenta[n] + (1 - beta) * p.grad
            nesterov = beta * momenta[n] + (1 - beta) * p.grad
            update = orthogonalize(nesterov[None], product_dtype)[0]
            expected[n] = expected[n] * (1 - lr * decay) - lr * 0.2 * max(shapes[n]) ** 0.5 * update
        optimizer.step()
    assert_all_close(params, expected, atol=tolerance, rtol=tolerance)


def test_muon_step_size_is_a_fifth_of_lr() -> None:
    """The root mean square of an update's entries is about 0.2 · lr for any shape."""
    for shape in ((64, 16), (16, 64), (128, 128)):
        p = torch.zeros(shape, requires_grad=True)
        p.grad = make_parameters([shape])[0].detach() * 1e3
        Muon([p], lr=1.0).step()
        assert p.detach().square().mean().sqrt().item() == pytest.approx(0.2, rel=0.2)


def test_muon_decays_weights() -> None:
    """With a zero gradient only weight decay acts."""
    p = make_parameters([(3, 4)])[0]
    before = p.detach().clone()
    p.grad = torch.zeros(3, 4)
    Muon([p], lr=0.1, weight_decay=0.5).step()
    torch.testing.assert_close(p.detach(), before * 0.95)


@pytest.mark.parametrize("shape", [(4,), (), (2, 3, 4, 5)])
def test_muon_takes_matrices_only(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="matri"):
        Muon(make_parameters([(2, 2), shape]))


def test_muon_learns_a_linear_map() -> None:
    torch.manual_seed(0)
    target, x = torch.randn(8, 12), torch.randn(256, 12)
    p = torch.zeros(8, 12, requires_grad=True)
    optimizer = Muon([p], lr=0.2, weight_decay=0.0)
    losses = []
    for step in range(120):
        optimizer.param_groups[0]["lr"] = lr_cosine_schedule(step, 0.3, 0.001, 0, 120)
        optimizer.zero_grad()
        loss = (x @ p.T - x @ target.T).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.01 * losses[0]


def test_each_matrix_of_a_stack_is_updated_by_itself() -> None:
    stack = torch.nn.Parameter(torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(0)))
    matrices = [torch.nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    gradients = (
        torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(1)) * torch.tensor([1.0, 9.0, 0.1])[:, None, None]
    )
    stack.grad = gradients.clone()
    for matrix, gradient in zip(matrices, gradients, strict=True):
        matrix.grad = gradient.clone()
    Muon([stack], lr=0.1).step()
    Muon(matrices, lr=0.1).step()
    torch.testing.assert_close(stack.detach(), torch.stack([matrix.detach() for matrix in matrices]))
