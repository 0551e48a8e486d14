"""SOAP-Muon against a written-out loop, and its basis."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.optim.muon import orthogonalize
from lm.optim.soap_muon import SoapMuon
from tests.helpers.optimizers import assert_all_close, make_parameters, set_gradients
from tests.helpers.tensors import FEW_EXAMPLES


@FEW_EXAMPLES
@given(
    shapes=st.lists(st.sampled_from([(6, 4), (4, 6), (5, 5), (1, 3), (3, 1)]), min_size=1, max_size=4),
    beta2=st.sampled_from([0.5, 0.95]),
    missing=st.booleans(),
)
def test_it_equals_a_written_out_loop(shapes: list[tuple[int, int]], beta2: float, missing: bool) -> None:
    """In float64, since an orthogonalization enlarges rounding errors where the gradients have no direction yet."""
    lr, beta, decay = 0.02, 0.9, 0.1
    params = [p.detach().double().requires_grad_() for p in make_parameters(shapes)]
    optimizer = SoapMuon(params, lr=lr, beta2=beta2, momentum=beta, weight_decay=decay)
    expected = [p.detach().clone() for p in params]
    momenta = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    bases = [torch.eye(min(shape), dtype=torch.float64) for shape in shapes]
    covariances = [torch.zeros_like(basis) for basis in bases]
    squares: list[torch.Tensor] = [torch.zeros(min(shape), max(shape), dtype=torch.float64) for shape in shapes]
    for step in range(6):
        set_gradients(params, step, missing)
        for n, p in enumerate(params):
            if p.grad is None:
                continue
            momenta[n] = beta * momenta[n] + (1 - beta) * p.grad
            nesterov, grad = beta * momenta[n] + (1 - beta) * p.grad, p.grad
            is_tall = shapes[n][0] > shapes[n][1]
            if is_tall:
                nesterov, grad = nesterov.T, grad.T
            squares[n] = beta2 * squares[n] + (1 - beta2) * (bases[n].T @ grad) ** 2
            preconditioned = bases[n] @ ((bases[n].T @ nesterov) / (squares[n] ** 0.5 + 1e-8))
            covariances[n] = beta2 * covariances[n] + (1 - beta2) * grad @ grad.T
            bases[n] = torch.linalg.qr(covariances[n] @ bases[n]).Q
            update = orthogonalize((preconditioned.T if is_tall else preconditioned)[None])[0]
            expected[n] = expected[n] * (1 - lr * decay) - lr * 0.2 * max(shapes[n]) ** 0.5 * update
        optimizer.step()
    assert_all_close(params, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("shape", [(6, 40), (40, 6)])
def test_the_basis_finds_the_eigenvectors_of_the_covariance(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    side = min(shape)
    axes = torch.linalg.qr(torch.randn(side, side, generator=generator)).Q
    p = torch.zeros(shape, requires_grad=True)
    optimizer = SoapMuon([p], lr=0.0, beta2=0.99)
    for _ in range(300):
        gradient = axes @ torch.diag(2.0 ** -torch.arange(side)) @ torch.randn(side, 40, generator=generator)
        p.grad = gradient if shape[0] == side else gradient.T.contiguous()
        optimizer.step()
    basis = optimizer.state[p]["basis"]
    torch.testing.assert_close(basis.T @ basis, torch.eye(side), atol=1e-5, rtol=0)
    assert (axes.T @ basis).diagonal().abs().min() > 0.97


def test_each_matrix_of_a_stack_is_updated_by_itself() -> None:
    [start] = make_parameters([(3, 8, 4)])
    stack = start.detach().double().requires_grad_()
    matrices = [matrix.clone().requires_grad_() for matrix in start.detach().double()]
    optimizers = SoapMuon([stack], lr=0.1), SoapMuon(matrices, lr=0.1)
    for step in range(3):
        set_gradients([stack], step)
        for matrix, gradient in zip(matrices, stack.grad if stack.grad is not None else [], strict=True):
            matrix.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(stack.detach(), torch.stack([matrix.detach() for matrix in matrices]))
