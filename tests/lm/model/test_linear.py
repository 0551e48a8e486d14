"""Linear and embedding layers against torch's."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from torch import nn

from lm.model.linear import Embedding, Linear
from tests.helpers.tensors import FEW_EXAMPLES, random_normal, seeds, shapes


@FEW_EXAMPLES
@given(seeds, shapes)
def test_linear_equals_torch(seed: int, shape: tuple[int, ...]) -> None:
    layer, reference = Linear(5, 7), nn.Linear(5, 7, bias=False)
    reference.load_state_dict(layer.state_dict())
    x = random_normal(*shape, 5, seed=seed)
    torch.testing.assert_close(layer(x), reference(x))


def test_linear_weight_is_out_by_in() -> None:
    layer = Linear(3, 2)
    assert layer.weight.shape == (2, 3)
    x = torch.tensor([1.0, 10.0, 100.0])
    by_hand = [sum((layer.weight[i, j] * x[j]).item() for j in range(3)) for i in range(2)]
    torch.testing.assert_close(layer(x), torch.tensor(by_hand))


@FEW_EXAMPLES
@given(seeds, shapes)
def test_embedding_equals_torch(seed: int, shape: tuple[int, ...]) -> None:
    layer, reference = Embedding(11, 4), nn.Embedding(11, 4)
    reference.load_state_dict(layer.state_dict())
    ids = torch.randint(11, shape, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(layer(ids), reference(ids))


@pytest.mark.parametrize(
    ("make", "std"),
    [(lambda: Linear(300, 500), math.sqrt(2 / 800)), (lambda: Embedding(500, 300), 1.0)],
    ids=["linear", "embedding"],
)
def test_initial_weights_are_normal_truncated_at_three_sigma(
    make: Callable[[], Linear | Embedding], std: float
) -> None:
    torch.manual_seed(0)
    weight = make().weight.detach() / std
    # The variance of a standard normal truncated at ±c is 1 - 2 c φ(c) / P(|x| < c).
    density = math.exp(-4.5) / math.sqrt(2 * math.pi)
    truncated_std = math.sqrt(1 - 6 * density / math.erf(3 / math.sqrt(2)))
    assert weight.abs().max() <= 3 + 1e-5
    assert weight.max() > 2.9 and weight.min() < -2.9
    assert weight.std().item() == pytest.approx(truncated_std, rel=0.01)
    assert weight.mean().item() == pytest.approx(0, abs=0.01)
    assert (weight.abs() < 1).float().mean().item() == pytest.approx(math.erf(1 / math.sqrt(2)) / 0.9973, abs=0.01)
