"""Masked means and sums against loops."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.posttrain import masked_mean, masked_normalize
from tests.helpers.tensors import FEW_EXAMPLES, random_normal, seeds


@FEW_EXAMPLES
@given(seeds, st.sampled_from([None, 0, 1, -1]), st.sampled_from([torch.bool, torch.int64, torch.float32]))
def test_equal_to_loops_over_the_unmasked_elements(seed: int, dim: int | None, dtype: torch.dtype) -> None:
    tensor = random_normal(3, 4, seed=seed).double()
    mask = torch.rand(3, 4, generator=torch.Generator().manual_seed(seed)) < 0.5
    rows = {None: [(tensor.flatten(), mask.flatten())], 0: list(zip(tensor.T, mask.T, strict=True))}.get(
        dim, list(zip(tensor, mask, strict=True))
    )
    sums = [sum(float(x) for x, keep in zip(*row, strict=True) if keep) for row in rows]
    counts = [int(row_mask.sum()) for _, row_mask in rows]
    means = [total / count if count else math.nan for total, count in zip(sums, counts, strict=True)]
    shape = () if dim is None else (len(rows),)
    torch.testing.assert_close(
        masked_mean(tensor, mask.to(dtype), dim), torch.tensor(means).double().reshape(shape), equal_nan=True
    )
    expected = torch.tensor(sums).double().reshape(shape) / 7
    torch.testing.assert_close(masked_normalize(tensor, mask.to(dtype), dim, 7.0), expected)


def test_values_and_gradients_of_masked_elements_do_not_count() -> None:
    tensor = torch.tensor([[1.0, math.nan, 3.0], [math.inf, 5.0, -math.inf]], requires_grad=True)
    mask = torch.tensor([[1, 0, 1], [0, 1, 0]])
    assert masked_mean(tensor, mask, -1).tolist() == [2.0, 5.0]
    masked_normalize(tensor, mask).backward()
    assert tensor.grad is not None and torch.equal(tensor.grad, mask.float())


def test_no_element() -> None:
    tensor, mask = torch.ones(2, 3), torch.zeros(2, 3)
    assert masked_mean(tensor, mask, 1).isnan().all()
    assert masked_normalize(tensor, mask, 1).tolist() == [0.0, 0.0]


def test_the_side_of_the_padding_does_not_matter() -> None:
    right, left = torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[9.0, 1.0, 2.0]])
    masks = torch.tensor([[1, 1, 0]]), torch.tensor([[0, 1, 1]])
    assert masked_mean(right, masks[0]) == masked_mean(left, masks[1]) == pytest.approx(1.5)
