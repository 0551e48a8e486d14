"""NorMuon against a written-out loop, and the size of its updates."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.optim.muon import orthogonalize
from lm.optim.normuon import NorMuon
from tests.helpers.optimizers import assert_all_close, make_parameters, set_gradients
from tests.helpers.tensors import FEW_EXAMPLES


@FEW_EXAMPLES
@given(
    shapes=st.lists(st.sampled_from([(6, 4), (4, 6), (5, 5), (1, 3), (3, 1)]), min_size=1, max_size=4),
    beta2=st.sampled_from([0.0, 0.5, 0.95]),
    missing=st.booleans(),
)
def test_it_equals_a_written_out_loop(shapes: list[tuple[int, int]], beta2: float, missing: bool) -> None:
    """Row by row. Products of stacked matrices may round differently."""
    lr, beta, decay = 0.02, 0.9, 0.1
    params = make_parameters(shapes)
    optimizer = NorMuon(params, lr=lr, beta2=beta2, momentum=beta, weight_decay=decay)
    expected = [p.detach().clone() for p in params]
    momenta = [torch.zeros(shape) for shape in shapes]
    squares = [torch.zeros(rows) for rows, _ in shapes]
    for step in range(6):
        set_gradients(params, step, missing)
        for n, p in enumerate(params):
            if p.grad is None:
                continue
            momenta[n] = beta * momenta[n] + (1 - beta) * p.grad
            update = orthogonalize((beta * momenta[n] + (1 - beta) * p.grad)[None])[0]
            for row in range(len(update)):
                squares[n][row] = beta2 * squares[n][row] + (1 - beta2) * update[row].square().mean()
                update[row] /= squares[n][row].sqrt() + 1e-8
            update *= 0.2 * update.numel() ** 0.5 / update.norm()
            expected[n] = expected[n] * (1 - lr * decay) - lr * update
        optimizer.step()
    assert_all_close(params, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("shape", [(64, 16), (16, 64), (3, 16, 8)])
def test_all_rows_move_by_a_fifth_of_lr(shape: tuple[int, ...]) -> None:
    p = torch.zeros(shape, requires_grad=True)
    generator = torch.Generator().manual_seed(0)
    p.grad = torch.randn(shape, generator=generator) * torch.logspace(-2, 2, shape[-2])[:, None]
    NorMuon([p], lr=1.0).step()
    torch.testing.assert_close(p.detach().square().mean(-1).sqrt(), torch.full(shape[:-1], 0.2), rtol=1e-3, atol=0)


def test_each_matrix_of_a_stack_is_updated_by_itself() -> None:
    [start] = make_parameters([(3, 8, 4)])
    stack = start.detach().clone().requires_grad_()
    matrices = [matrix.clone().requires_grad_() for matrix in start.detach()]
    optimizers = NorMuon([stack], lr=0.1), NorMuon(matrices, lr=0.1)
    for step in range(3):
        set_gradients([stack], step)
        for matrix, gradient in zip(matrices, stack.grad if stack.grad is not None else [], strict=True):
            matrix.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(stack.detach(), torch.stack([matrix.detach() for matrix in matrices]))
