"""Vector operations on pages of the KV cache equal numpy's."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.inference.runners.cpu_layers import flat_array
from lm.kernels.decode.page_operations import PAGE_TOKENS, add_page, score_page
from lm.kernels.jit import Floats, Stored, kernel
from tests.helpers.examples import examples

_BEFORE = 3  # numbers of other pages, so that a page is not aligned


@kernel
def _score(keys: Stored, at: int, query: Floats, width: int, count: int, scores: Floats) -> np.float32:
    return score_page(keys, at, query, 1, width, count, scores, 2)


@kernel
def _add(values: Stored, at: int, weights: Floats, count: int, width: int, sums: Floats) -> None:
    add_page(values, at, weights, 1, count, width, sums, 2)


def _page(generator: torch.Generator, width: int, count: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return stored numbers, and the used part of the page as float64; the rest of the page is NaN."""
    stored = torch.full((_BEFORE + PAGE_TOKENS * width,), torch.nan).to(dtype)
    page = torch.randn(count, width, generator=generator).to(dtype)
    stored[_BEFORE : _BEFORE + page.numel()] = page.flatten()
    return flat_array(stored), page.double().numpy()


@examples(60)
@given(width=st.integers(1, 140), count=st.integers(1, PAGE_TOKENS), seed=st.integers(0, 999))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_equal_the_products(dtype: torch.dtype, width: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    stored, keys = _page(generator, width, count, dtype)
    query = torch.randn(1 + width, generator=generator).numpy()
    scores = np.full(2 + PAGE_TOKENS + 1, 7, np.float32)
    largest = _score(stored, _BEFORE, query, width, count, scores)
    expected = keys @ query[1:].astype(np.float64)
    np.testing.assert_allclose(scores[2 : 2 + count], expected, rtol=1e-4, atol=1e-4)
    assert (scores[2 + count : -1] == -np.inf).all()
    assert largest == scores[2:-1].max()
    assert scores[[0, 1, -1]].tolist() == [7, 7, 7]


@examples(60)
@given(width=st.integers(1, 140), count=st.integers(1, PAGE_TOKENS), seed=st.integers(0, 999))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weighted_values_are_added(dtype: torch.dtype, width: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    stored, values = _page(generator, width, count, dtype)
    weights = torch.rand(1 + count, generator=generator).numpy()
    before = torch.randn(2 + width + 1, generator=generator).numpy()
    sums = before.copy()
    _add(stored, _BEFORE, weights, count, width, sums)
    expected = before[2:-1] + weights[1:].astype(np.float64) @ values
    np.testing.assert_allclose(sums[2:-1], expected, rtol=1e-4, atol=1e-4)
    assert sums[[0, 1, -1]].tolist() == before[[0, 1, -1]].tolist()
