"""The plain reference functions against torch's."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from lm.model.functional import cross_entropy, scaled_dot_product_attention, silu, softmax
from tests.helpers.tensors import FEW_EXAMPLES, random_normal, seeds, shapes


@FEW_EXAMPLES
@given(seeds, shapes, st.sampled_from([0.1, 1.0, 50.0]))
def test_silu_equals_torch(seed: int, shape: tuple[int, ...], scale: float) -> None:
    x = random_normal(*shape, seed=seed, scale=scale)
    torch.testing.assert_close(silu(x), F.silu(x))


@FEW_EXAMPLES
@given(seeds, st.integers(0, 2), st.sampled_from([1e-3, 1.0, 30.0, 1e4]))
def test_softmax_equals_torch(seed: int, dim: int, scale: float) -> None:
    x = random_normal(2, 3, 5, seed=seed, scale=scale)
    for axis in (dim, dim - 3):
        torch.testing.assert_close(softmax(x, axis), torch.softmax(x, axis))


def test_wide_rows_in_float16() -> None:
    """The sum of the exponentials exceeds the range of float16."""
    logits = torch.zeros(1, 70_000).half()
    torch.testing.assert_close(softmax(logits), torch.softmax(logits, -1))
    loss = cross_entropy(logits, torch.tensor([3]))
    torch.testing.assert_close(loss, torch.tensor(math.log(70_000)).half())


def test_softmax_is_invariant_to_a_shift() -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(softmax(x + 1e4), softmax(x), atol=1e-3, rtol=0)
    assert torch.equal(softmax(torch.tensor([-math.inf, 0.0])), torch.tensor([0.0, 1.0]))


@FEW_EXAMPLES
@given(seeds, shapes, st.integers(1, 5), st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.booleans())
def test_attention_equals_torch(
    seed: int, batch: tuple[int, ...], queries: int, keys: int, d_k: int, d_v: int, masked: bool
) -> None:
    q, k, v = (
        random_normal(*batch, *size, seed=seed + i) for i, size in enumerate([(queries, d_k), (keys, d_k), (keys, d_v)])
    )
    mask = None
    if masked:
        mask = torch.rand(*batch, queries, keys, generator=torch.Generator().manual_seed(seed)) < 0.5
        mask[..., 0] = True  # each row must allow a key
    expected = F.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, mask), expected)


@FEW_EXAMPLES
@given(seeds, shapes, st.integers(1, 20), st.sampled_from([1e-3, 1.0, 100.0, 1e4]))
def test_cross_entropy_equals_torch(seed: int, shape: tuple[int, ...], vocab: int, scale: float) -> None:
    logits = random_normal(*shape, vocab, seed=seed, scale=scale)
    targets = torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))
    expected = F.cross_entropy(logits.reshape(-1, vocab), targets.reshape(-1))
    torch.testing.assert_close(cross_entropy(logits, targets), expected, atol=1e-5, rtol=1e-5)


@FEW_EXAMPLES
@given(seeds, st.sampled_from([-100, -1, 0, 3]), st.sampled_from([torch.float32, torch.bfloat16]))
def test_cross_entropy_skips_ignored_targets(seed: int, ignored: int, dtype: torch.dtype) -> None:
    logits = random_normal(4, 5, 7, seed=seed).to(dtype).requires_grad_()
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(7, (4, 5), generator=generator)
    targets[torch.rand(4, 5, generator=generator) < 0.4] = ignored
    targets[0, 0] = 1
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=ignored)
    loss = cross_entropy(logits, targets, ignored)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]  # intermediate values are rounded to bfloat16
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    gradients = (torch.autograd.grad(result, logits)[0] for result in (loss, expected))
    torch.testing.assert_close(*gradients, rtol=tolerance, atol=tolerance / 5)


def test_cross_entropy_gradient_equals_torch() -> None:
    targets = torch.tensor([0, -100, 2, 4])
    gradients = []
    for loss_function in (cross_entropy, F.cross_entropy):
        logits = random_normal(4, 5).requires_grad_()
        loss_function(logits, targets).backward()
        gradients.append(logits.grad)
    torch.testing.assert_close(*gradients)


def test_cross_entropy_of_huge_logits() -> None:
    logits = torch.tensor([[1e4, -1e4], [1e4, -1e4]])
    assert cross_entropy(logits, torch.tensor([0, 0])).item() == 0
    assert cross_entropy(logits, torch.tensor([1, 1])).item() == pytest.approx(2e4)


def test_cross_entropy_without_targets_is_nan() -> None:
    assert cross_entropy(random_normal(2, 3), torch.tensor([-100, -100])).isnan()
