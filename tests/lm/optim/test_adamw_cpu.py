"""AdamW's kernel for CPUs against torch's operators."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lm.optim.adamw import AdamW, _update
from lm.optim.adamw_cpu import update_on_cpu
from tests.helpers.examples import examples

GROUP = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "is_cautious": False}
SPECIAL = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, 1e-38, -1e-30, 1e-20, 1e20, 3e38, -3e38])


def make_row(shape: tuple[int, ...], seed: int = 0, offset: int = 0) -> tuple[Tensor, ...]:
    """Return a parameter, its gradient and its moments, each from number ``offset`` of a storage on."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel()
    scales = 10.0 ** torch.randint(-9, 3, (4, size), generator=generator)
    numbers = torch.randn(4, size, generator=generator) * scales
    numbers[3].square_()
    row = [torch.cat([torch.zeros(offset), x])[offset:].view(shape) for x in numbers]
    return (nn.Parameter(row[0]), *row[1:])


def exact_roots(tensors: list[Tensor]) -> list[Tensor]:
    """Return the square roots, each rounded once; those of torch may be MKL's, which are not."""
    return [x.double().sqrt().float() for x in tensors]


def update_slowly(rows: list[tuple[Tensor, ...]], t: int, group: dict[str, Any]) -> None:
    with torch.no_grad(), patch.object(torch, "_foreach_sqrt", exact_roots):
        params, grads, m, v = map(list, zip(*rows, strict=True))
        _update(params, grads, m, v, t, group, None)


def assert_same(rows: list[tuple[Tensor, ...]], expected: list[tuple[Tensor, ...]]) -> None:
    for row, expected_row in zip(rows, expected, strict=True):
        for x, y in zip(row, expected_row, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="torch has no fused multiply-add on this CPU"
)
@given(
    shapes=st.lists(
        st.sampled_from([(), (0,), (1,), (5,), (3, 7), (0, 4), (4, 8, 2), (131,), (40, 60)]), min_size=1, max_size=5
    ),
    offset=st.integers(0, 3),
    lr=st.sampled_from([0.0, 1e-4, 0.5]),
    betas=st.tuples(*[st.sampled_from([0.0, 0.3, 0.5, 0.9, 0.999])] * 2),
    eps=st.sampled_from([0.0, 1e-8, 1e-3]),
    weight_decay=st.sampled_from([0.0, 0.01, 0.3]),
    is_cautious=st.booleans(),
    first_step=st.integers(1, 3000),
    has_special_numbers=st.booleans(),
    part=st.sampled_from([1, 50, 1000, 1 << 16]),
    seed=st.integers(0, 1 << 30),
)
@examples(300)
def test_the_kernel_gives_the_bits_of_the_reference(
    shapes: list[tuple[int, ...]],
    offset: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    is_cautious: bool,
    first_step: int,
    has_special_numbers: bool,
    part: int,
    seed: int,
) -> None:
    """At any alignment, in one thread and in three. Only the roots are not torch's, because those of MKL differ."""
    group = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "is_cautious": is_cautious}
    rows, expected = ([make_row(shape, seed, offset) for shape in shapes] for _ in range(2))
    for t in range(first_step, first_step + 3):
        for some in (rows, expected):
            for number, row in enumerate(some):
                generator = torch.Generator().manual_seed(seed + t + number)
                row[1].normal_(generator=generator)
                if has_special_numbers:
                    chosen = torch.randint(4 * len(SPECIAL), row[1].shape, generator=generator)
                    row[1].copy_(torch.where(chosen < len(SPECIAL), SPECIAL[chosen % len(SPECIAL)], row[1]))
        with patch("lm.optim.adamw_cpu._PART", part), patch.object(torch, "get_num_threads", lambda: 3):
            assert update_on_cpu(rows, t, group) == []
        update_slowly(expected, t, group)
        assert_same(rows, expected)


def test_other_tensors_are_left_to_torch() -> None:
    plain = make_row((4, 6))
    double = tuple(x.double() for x in make_row((3,)))
    transposed = tuple(x.t() for x in make_row((4, 6)))
    other_gradient = (make_row((2,))[0], *(x.bfloat16() for x in make_row((2,))[1:2]), *make_row((2,))[2:])
    rows = [double, plain, transposed, other_gradient]
    before = [tuple(x.clone() for x in row) for row in rows]
    others = update_on_cpu(rows, 1, GROUP)
    assert [id(row) for row in others] == [id(row) for row in (double, transposed, other_gradient)]
    update_slowly(before[1:2], 1, GROUP)
    assert_same(rows, before)


def test_an_optimizer_updates_tensors_of_both_kinds() -> None:
    rows = [make_row((4, 6), seed) for seed in range(3)]
    params = [rows[0][0], nn.Parameter(rows[1][0].detach().t()), nn.Parameter(rows[2][0].detach().double())]
    expected = [p.detach().double().clone().requires_grad_() for p in params]
    optimizers = AdamW(params), torch.optim.AdamW(expected)
    for step in range(5):
        for p, q in zip(params, expected, strict=True):
            p.grad = torch.randn_like(p) * (step + 1)
            q.grad = p.grad.double()
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach().double(), q.detach(), rtol=1e-5, atol=1e-6)


def test_a_backward_pass_after_the_update_of_its_weights_fails() -> None:
    """As after an operator in place: its gradients would be those of other weights."""
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    loss = weight.square().sum()
    AdamW([weight]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_moment_of_another_shape_is_an_error() -> None:
    """The kernel would write past its end."""
    parameter = nn.Parameter(torch.ones(5))
    optimizer = AdamW([parameter])
    parameter.grad = torch.ones(5)
    optimizer.step()
    optimizer.state[parameter]["m"] = torch.zeros(())
    with pytest.raises(RuntimeError, match="shape"):
        optimizer.step()
