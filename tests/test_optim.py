"""Optimizers against torch's own and against written-out loops; the schedule and clipping by hand."""

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lm.optim import SGD, AdamW, Muon, clip_grad_norm, lr_cosine_schedule, lr_wsd_schedule, orthogonalize

FEW = settings(deadline=None, max_examples=15)
SHAPES = [(3, 4), (7,), (), (2, 3, 2), (1, 1), (5, 2)]


def parameters(shapes: list[tuple[int, ...]], seed: int = 0) -> list[Tensor]:
    """Random parameters, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def set_gradients(params: list[Tensor], step: int, missing: bool = False) -> None:
    """Random gradients that depend on the step alone; with ``missing`` some parameters get none at some steps."""
    generator = torch.Generator().manual_seed(1000 + step)
    for n, p in enumerate(params):
        gradient = torch.randn(p.shape, generator=generator) * 10.0 ** (n % 3 - 1)
        p.grad = None if missing and (step + n) % 3 == 0 else gradient


def assert_same(ours: list[Tensor], theirs: list[Tensor], **tolerance: float) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), **tolerance)


# AdamW


@FEW
@given(
    lr=st.sampled_from([0.0, 1e-4, 1e-2, 0.5]),
    betas=st.sampled_from([(0.9, 0.999), (0.0, 0.95), (0.9, 0.0), (0.8, 0.9)]),
    eps=st.sampled_from([1e-8, 1e-3]),
    weight_decay=st.sampled_from([0.0, 0.01, 0.3]),
    missing=st.booleans(),
)
def test_adamw_equals_torch(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float, missing: bool
) -> None:
    options: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    ours, theirs = parameters(SHAPES), parameters(SHAPES)
    mine, reference = AdamW(ours, **options), torch.optim.AdamW(theirs, **options)
    for step in range(40):
        set_gradients(ours, step, missing)
        set_gradients(theirs, step, missing)
        mine.step()
        reference.step()
    assert_same(ours, theirs, atol=1e-5, rtol=1e-5)


def test_adamw_defaults_are_torchs() -> None:
    ours, theirs = AdamW(parameters([(2,)])).defaults, torch.optim.AdamW(parameters([(2,)])).defaults
    assert ours == {key: theirs[key] for key in ours}


def test_adamw_first_step_by_hand() -> None:
    """After the bias correction the first step is lr · sign(grad), beside the decay."""
    p = torch.tensor([2.0, -3.0], requires_grad=True)
    p.grad = torch.tensor([0.5, -40.0])
    AdamW([p], lr=0.1, weight_decay=0.2).step()
    torch.testing.assert_close(p.detach(), torch.tensor([2.0 * 0.98 - 0.1, -3.0 * 0.98 + 0.1]))


def test_adamw_groups_have_their_own_options() -> None:
    ours, theirs = parameters([(3,), (2, 2)]), parameters([(3,), (2, 2)])
    optimizers = [
        kind([{"params": p[:1], "lr": 0.1}, {"params": p[1:], "weight_decay": 0.5}], lr=0.01)
        for kind, p in ((AdamW, ours), (torch.optim.AdamW, theirs))
    ]
    for step in range(10):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)  # as a schedule does
            optimizer.step()
    assert_same(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", [SGD, AdamW, Muon])
def test_restored_optimizer_continues_exactly(kind: type[torch.optim.Optimizer]) -> None:
    shapes = [(3, 4), (3, 4), (6, 2)]
    whole = parameters(shapes)
    optimizer = kind(whole)
    for step in range(5):
        set_gradients(whole, step, missing=True)
        optimizer.step()
    restored = [p.detach().clone().requires_grad_() for p in whole]
    second = kind(restored, lr=99.0)  # the saved hyperparameters replace this
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(5, 10):
        for params, current in ((whole, optimizer), (restored, second)):
            set_gradients(params, step, missing=True)
            current.step()
    assert_same(whole, restored, atol=0, rtol=0)


@pytest.mark.parametrize("kind", [SGD, AdamW, Muon])
def test_parameters_without_gradient_stay(kind: type[torch.optim.Optimizer]) -> None:
    """Not even weight decay touches them, as in torch."""
    params = parameters([(3, 4), (3, 4)])
    before = params[1].detach().clone()
    params[0].grad = torch.ones(3, 4)
    kind(params).step()
    assert torch.equal(params[1].detach(), before)


@pytest.mark.parametrize("kind", [SGD, AdamW, Muon])
def test_closure_is_evaluated_with_gradients(kind: type[torch.optim.Optimizer]) -> None:
    params = parameters([(3, 4)])
    optimizer = kind(params, lr=1e-2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = params[0].square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]
    assert params[0].requires_grad


@pytest.mark.parametrize("kind", [SGD, AdamW, Muon])
def test_step_without_closure_returns_none(kind: type[torch.optim.Optimizer]) -> None:
    assert kind(parameters([(2, 2)])).step() is None


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (SGD, {"lr": -1.0}),
        (AdamW, {"lr": -1.0}),
        (AdamW, {"betas": (1.0, 0.9)}),
        (AdamW, {"betas": (0.9, -0.1)}),
        (AdamW, {"eps": -1e-8}),
        (AdamW, {"weight_decay": -0.1}),
        (Muon, {"lr": -1.0}),
        (Muon, {"momentum": 1.0}),
        (Muon, {"momentum": -0.5}),
        (Muon, {"weight_decay": -0.1}),
    ],
)
def test_invalid_hyperparameters(kind: type[torch.optim.Optimizer], wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        kind(parameters([(2, 2)]), **wrong)


# SGD


def test_sgd_equals_formula() -> None:
    """p ← p - lr / sqrt(t + 1) · grad, where t counts the parameter's own steps."""
    ours, expected = parameters([(3, 2), (4,)]), [p.detach().clone() for p in parameters([(3, 2), (4,)])]
    optimizer = SGD(ours, lr=0.3)
    counts = [0, 0]
    for step in range(12):
        set_gradients(ours, step, missing=True)
        for n, p in enumerate(ours):
            if p.grad is not None:
                expected[n] -= 0.3 / math.sqrt(counts[n] + 1) * p.grad
                counts[n] += 1
        optimizer.step()
    assert counts == [8, 8]
    assert_same(ours, expected)


# Muon


@FEW
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 3),
    size=st.sampled_from([(64, 16), (16, 64), (96, 40), (40, 96), (8, 3), (1, 5)]),
    scale=st.sampled_from([1e-4, 1.0, 1e4]),
)
def test_orthogonalize_brings_singular_values_near_one(
    seed: int, count: int, size: tuple[int, int], scale: float
) -> None:
    """Singular values go into [0.6, 1.3] and the singular vectors stay: in their bases the result is near diagonal."""
    matrices = torch.randn(count, *size, generator=torch.Generator().manual_seed(seed)) * scale
    result = orthogonalize(matrices)
    assert result.shape == matrices.shape and result.dtype == matrices.dtype
    u, s, vh = torch.linalg.svd(matrices.double(), full_matrices=False)
    inner = u.mT @ result.double() @ vh.mT
    values = inner.diagonal(dim1=-2, dim2=-1)
    strong = s > 0.05 * s.amax(-1, keepdim=True)  # five steps do not lift what is nearly zero
    assert values[strong].min() > 0.6 and values[strong].max() < 1.3
    assert torch.linalg.svdvals(result.double()).max() < 1.3
    assert (inner - torch.diag_embed(values)).abs().max() < 0.1


def test_orthogonalize_lifts_a_wide_spectrum() -> None:
    """Condition number 30: the largest and the smallest direction end up about alike."""
    generator = torch.Generator().manual_seed(0)
    u, _ = torch.linalg.qr(torch.randn(32, 32, generator=generator))
    v, _ = torch.linalg.qr(torch.randn(48, 32, generator=generator))
    matrix = u @ torch.diag(torch.logspace(0, -1.5, 32)) @ v.T
    values = torch.linalg.svdvals(orthogonalize(matrix[None])[0])
    assert values.min() > 0.6 and values.max() < 1.3


def test_orthogonalize_of_zeros_is_zero() -> None:
    assert torch.equal(orthogonalize(torch.zeros(2, 3, 5)), torch.zeros(2, 3, 5))


@pytest.mark.parametrize("missing", [False, True])
def test_muon_equals_written_out_loop(missing: bool) -> None:
    """Momentum, Nesterov, scale and decay, one matrix after the other; batched bfloat16 products round differently."""
    shapes = [(6, 4), (4, 6), (6, 4), (5, 5)]
    lr, beta, decay = 0.02, 0.9, 0.1
    ours = parameters(shapes)
    optimizer = Muon(ours, lr=lr, momentum=beta, weight_decay=decay)
    expected = [p.detach().clone() for p in ours]
    momenta = [torch.zeros(shape) for shape in shapes]
    for step in range(10):
        set_gradients(ours, step, missing)
        for n, p in enumerate(ours):
            if p.grad is None:
                continue
            momenta[n] = beta * momenta[n] + (1 - beta) * p.grad
            looked_ahead = beta * momenta[n] + (1 - beta) * p.grad
            update = orthogonalize(looked_ahead[None])[0]
            expected[n] = expected[n] * (1 - lr * decay) - lr * 0.2 * max(shapes[n]) ** 0.5 * update
        optimizer.step()
    assert_same(ours, expected, atol=1e-3, rtol=1e-3)


def test_muon_step_size_is_a_fifth_of_lr() -> None:
    """The root mean square of an update's entries is about 0.2 · lr, whatever the shape."""
    for shape in ((64, 16), (16, 64), (128, 128)):
        p = torch.zeros(shape, requires_grad=True)
        p.grad = parameters([shape])[0].detach() * 1e3
        Muon([p], lr=1.0).step()
        assert p.detach().square().mean().sqrt().item() == pytest.approx(0.2, rel=0.2)


def test_muon_decays_weights() -> None:
    """A zero gradient leaves the decay alone."""
    p = parameters([(3, 4)])[0]
    before = p.detach().clone()
    p.grad = torch.zeros(3, 4)
    Muon([p], lr=0.1, weight_decay=0.5).step()
    torch.testing.assert_close(p.detach(), before * 0.95)


@pytest.mark.parametrize("shape", [(4,), (), (2, 3, 4)])
def test_muon_takes_matrices_only(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="matri"):
        Muon(parameters([(2, 2), shape]))


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


# The schedule


@pytest.mark.parametrize(
    ("it", "lr"),
    [
        (0, 0.0),
        (1, 0.1),
        (5, 0.5),
        (9, 0.9),
        (10, 1.0),  # the top
        (15, 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2),  # a quarter of the half cosine: cos 45° = sqrt(1/2)
        (20, 0.55),  # the middle
        (25, 0.1 + 0.9 * (1 - math.sqrt(0.5)) / 2),
        (30, 0.1),  # the end
        (31, 0.1),
        (10**9, 0.1),
    ],
)
def test_cosine_schedule_by_hand(it: int, lr: float) -> None:
    assert lr_cosine_schedule(it, max_lr=1.0, min_lr=0.1, warmup_iters=10, cosine_iters=30) == pytest.approx(lr)


@pytest.mark.parametrize(
    ("it", "lr"), [(0, 0.0), (5, 0.5), (10, 1.0), (79, 1.0), (80, 1.0), (90, 0.55), (95, 0.325), (100, 0.1)]
)
def test_wsd_schedule_by_hand(it: int, lr: float) -> None:
    found = lr_wsd_schedule(it, max_lr=1.0, min_lr=0.1, warmup_iters=10, decay_iters=20, iters=100)
    assert found == pytest.approx(lr)


def test_wsd_schedule_at_the_edges() -> None:
    assert lr_wsd_schedule(0, 1.0, 0.1, 0, 1, 10) == 1.0
    assert lr_wsd_schedule(10, 1.0, 0.1, 0, 1, 10) == pytest.approx(0.1)
    assert lr_wsd_schedule(11, 1.0, 0.1, 0, 1, 10) == pytest.approx(0.1), "past the end it stays"
    assert [lr_wsd_schedule(it, 1.0, 0.0, 5, 10, 10) for it in (3, 6)] == pytest.approx([0.6, 0.4])


def test_cosine_schedule_without_warmup_or_decay() -> None:
    assert lr_cosine_schedule(0, 1.0, 0.1, 0, 10) == 1.0
    assert lr_cosine_schedule(5, 1.0, 0.1, 5, 5) == 0.1  # no cosine between: straight to the end
    assert lr_cosine_schedule(0, 1.0, 0.1, 0, 0) == 0.1


@FEW
@given(st.integers(0, 30), st.integers(0, 60), st.floats(0, 1), st.floats(0, 1))
def test_cosine_schedule_rises_then_falls(warmup: int, decay: int, a: float, b: float) -> None:
    low, high = sorted((a, b))
    rates = [lr_cosine_schedule(it, high, low, warmup, warmup + decay) for it in range(warmup + decay + 5)]
    assert all(x <= y for x, y in itertools.pairwise(rates[:warmup]))
    assert all(x >= y - 1e-12 for x, y in itertools.pairwise(rates[warmup:]))
    assert all(-1e-12 <= rate <= high + 1e-12 for rate in rates)
    assert all(rate >= low - 1e-12 for rate in rates[warmup:])


# Clipping


@FEW
@given(seed=st.integers(0, 10**6), max_norm=st.sampled_from([1e-3, 0.1, 1.0, 50.0, 1e6]), missing=st.booleans())
def test_clip_grad_norm_equals_torch(seed: int, max_norm: float, missing: bool) -> None:
    ours, theirs = parameters(SHAPES), parameters(SHAPES)
    set_gradients(ours, seed, missing)
    set_gradients(theirs, seed, missing)
    norm = clip_grad_norm(iter(ours), max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    torch.testing.assert_close(norm, expected)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None and b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad)


def test_clip_grad_norm_by_hand() -> None:
    a, b = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    a.grad, b.grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert clip_grad_norm([a, b], 1.0).item() == 5.0
    torch.testing.assert_close(torch.cat([a.grad, b.grad]), torch.tensor([0.6, 0.8]))


def test_clip_leaves_small_gradients_as_they_are() -> None:
    p = torch.zeros(3, requires_grad=True)
    p.grad = torch.tensor([0.1, 0.2, 0.3])
    before = p.grad.clone()
    clip_grad_norm([p], 1.0)
    assert torch.equal(p.grad, before)


def test_clip_without_gradients() -> None:
    assert clip_grad_norm(parameters([(2, 2)]), 1.0).item() == 0.0
    assert clip_grad_norm([], 1.0).item() == 0.0
