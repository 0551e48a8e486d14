"""Cautious weight decay against its definition, in AdamW and Muon, with and without a kernel."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lm.optim.adamw import AdamW
from lm.optim.muon import Muon
from lm.optim.optimizer import Optimizer
from lm.optim.weight_decay import decay_weights


def test_only_weights_that_the_update_moves_toward_0_shrink() -> None:
    weights = torch.tensor([2.0, 2.0, -2.0, -2.0, 0.0, 2.0], dtype=torch.float64)
    updates = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    decay_weights([weights], [updates], 0.9, is_cautious=True)
    assert weights.tolist() == [1.8, 2.0, -1.8, -2.0, 0.0, 1.8]


def step_twice(
    optimizer_cls: type[AdamW | Muon], dtype: torch.dtype, found_inf: Tensor | None, **options: Any
) -> list[Tensor]:
    """Return the weights before and after each of two steps."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(6, 10, generator=generator, dtype=torch.float64).to(dtype))
    optimizer: Optimizer = optimizer_cls([weight], lr=0.1, **options)
    weights = [weight.detach().clone()]
    for _ in range(2):
        weight.grad = torch.randn(6, 10, generator=generator, dtype=torch.float64).to(dtype)
        optimizer.step(None, found_inf)  # type: ignore[call-overload]
        weights.append(weight.detach().clone())
    return weights


@pytest.mark.parametrize("found_inf", [None, torch.tensor(False)], ids=["plain", "found_inf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("optimizer_cls", [AdamW, Muon])
def test_an_optimizer_decays_with_caution(
    optimizer_cls: type[AdamW | Muon], dtype: torch.dtype, found_inf: Tensor | None
) -> None:
    """The first step: the update is that without decay."""
    start, plain, _ = step_twice(optimizer_cls, dtype, found_inf, weight_decay=0.0)
    _, decayed, _ = step_twice(optimizer_cls, dtype, found_inf, weight_decay=0.5, is_cautious=True)
    update = start - plain
    expected = torch.where(start * update >= 0, start * 0.95, start) - update
    torch.testing.assert_close(decayed, expected, rtol=1e-5, atol=1e-6)
    assert not torch.equal(decayed, plain)


def test_a_skipped_step_decays_nothing() -> None:
    start, first, second = step_twice(Muon, torch.float32, torch.tensor(True), weight_decay=0.5, is_cautious=True)
    assert torch.equal(start, first) and torch.equal(start, second)


def test_options_that_an_earlier_version_did_not_save_get_their_defaults() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = AdamW([weight], is_cautious=True)
    state = optimizer.state_dict()
    del state["param_groups"][0]["is_cautious"]
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["is_cautious"]
