"""The average of weights against the mean of copies."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lm.optim.weight_average import WeightAverage


@given(steps=st.integers(1, 12), seed=st.integers(0, 1000), saved_after=st.integers(0, 12))
def test_the_average_is_the_mean_of_all_steps(steps: int, seed: int, saved_after: int) -> None:
    """Also if its state is saved and loaded on the way."""
    generator = torch.Generator().manual_seed(seed)
    params = [nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(5, dtype=torch.float64))]
    average, copies = WeightAverage(params), []
    assert not average.has_started
    for step in range(steps):
        with torch.no_grad():
            for p in params:
                p.copy_(torch.randn(p.shape, generator=generator))
        average.step()
        copies.append([p.detach().clone() for p in params])
        if step == saved_after:
            state = average.state_dict()
            average = WeightAverage(params)
            average.load_state_dict(state)
    assert average.has_started
    with average.swapped():
        for p, values in zip(params, zip(*copies, strict=True), strict=True):
            torch.testing.assert_close(p.detach(), torch.stack(values).mean(0), rtol=1e-5, atol=1e-6)
    assert all(torch.equal(p, copy) for p, copy in zip(params, copies[-1], strict=True))


def test_the_weights_return_after_an_error() -> None:
    p = nn.Parameter(torch.tensor([1.0]))
    average = WeightAverage([p])
    average.step()
    with torch.no_grad():
        p.fill_(3.0)
    average.step()
    with pytest.raises(ZeroDivisionError), average.swapped():
        assert p.item() == 2.0
        raise ZeroDivisionError
    assert p.item() == 3.0
