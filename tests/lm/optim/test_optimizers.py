"""Behaviour that all optimizers share."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from lm.optim.adamw import AdamW
from lm.optim.clip import clip_grad_norm
from lm.optim.muon import Muon
from lm.optim.normuon import NorMuon
from lm.optim.sgd import SGD
from lm.optim.soap_muon import SoapMuon
from tests.helpers.optimizers import assert_all_close, make_parameters, set_gradients

AnyOptimizer = type[SGD] | type[AdamW] | type[Muon]


@pytest.mark.parametrize("optimizer_class", [SGD, AdamW, Muon, NorMuon, SoapMuon])
def test_restored_optimizer_continues_exactly(optimizer_class: AnyOptimizer) -> None:
    shapes = [(3, 4), (3, 4), (6, 2)]
    uninterrupted = make_parameters(shapes)
    optimizer = optimizer_class(uninterrupted)
    for step in range(5):
        set_gradients(uninterrupted, step, missing=True)
        optimizer.step()
    restored = [p.detach().clone().requires_grad_() for p in uninterrupted]
    second = optimizer_class(restored, lr=99.0)  # the saved hyperparameters replace this
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(5, 10):
        for params, current in ((uninterrupted, optimizer), (restored, second)):
            set_gradients(params, step, missing=True)
            current.step()
    assert_all_close(uninterrupted, restored, atol=0, rtol=0)


@pytest.mark.parametrize("optimizer_class", [SGD, AdamW, Muon, NorMuon, SoapMuon])
def test_parameters_without_gradient_do_not_change(optimizer_class: AnyOptimizer) -> None:
    """Weight decay does not change them either, as in torch."""
    params = make_parameters([(3, 4), (3, 4)])
    before = params[1].detach().clone()
    params[0].grad = torch.ones(3, 4)
    optimizer_class(params).step()
    assert torch.equal(params[1].detach(), before)


@pytest.mark.parametrize("optimizer_class", [SGD, AdamW, Muon, NorMuon, SoapMuon])
def test_closure_is_evaluated_with_gradients(optimizer_class: AnyOptimizer) -> None:
    params = make_parameters([(3, 4)])
    optimizer = optimizer_class(params, lr=1e-2)

    def closure() -> float:
        optimizer.zero_grad()
        loss = params[0].square().sum()
        loss.backward()
        return loss.item()

    losses: list[Any] = [optimizer.step(closure) for _ in range(5)]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]
    assert params[0].requires_grad


@pytest.mark.parametrize("optimizer_class", [SGD, AdamW, Muon, NorMuon, SoapMuon])
def test_step_without_closure_returns_none(optimizer_class: AnyOptimizer) -> None:
    assert optimizer_class(make_parameters([(2, 2)])).step() is None


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
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
        (NorMuon, {"beta2": 1.0}),
        (SoapMuon, {"beta2": -0.1}),
    ],
)
def test_invalid_hyperparameters(optimizer_class: AnyOptimizer, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        optimizer_class(make_parameters([(2, 2)]), **options)


@pytest.mark.parametrize("optimizer_class", [AdamW, Muon, NorMuon, SoapMuon])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_found_inf_skips_a_step(optimizer_class: type[AdamW] | type[Muon], dtype: torch.dtype) -> None:
    """False: the step is a usual one. True: parameters and state do not change, whatever the gradients are."""
    shapes = [(3, 4), (3, 4), (6, 2)]
    params, expected = ([p.detach().to(dtype).requires_grad_() for p in make_parameters(shapes)] for _ in range(2))
    optimizer, usual = optimizer_class(params, weight_decay=0.1), optimizer_class(expected, weight_decay=0.1)
    for step in range(6):
        for some in (params, expected):
            set_gradients(some, step)
        optimizer.step(None, torch.tensor(False))
        usual.step()
        assert_all_close(params, expected)
    state_before = copy.deepcopy(optimizer.state_dict()["state"])
    for p, value in zip(params, (torch.nan, torch.inf, -torch.inf), strict=True):
        p.grad = torch.full_like(p, value)
    before = [p.detach().clone() for p in params]
    optimizer.step(None, torch.tensor(True))
    assert_all_close(params, before, atol=0, rtol=0)
    for key, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, state_before[key][name]) for name, value in state.items() if name != "t")


def test_no_step_reads_a_value_on_the_host() -> None:
    """Reading a value would make the host wait for a GPU. Fake tensors have no values, so a read raises."""
    with FakeTensorMode():
        params = [nn.Parameter(torch.randn(8, 4)) for _ in range(2)]
        for p in params:
            p.grad = torch.randn(8, 4)
        norm = clip_grad_norm(params, 1.0)
        for optimizer_class in (AdamW, Muon, NorMuon, SoapMuon):
            optimizer_class(params).step()
            optimizer_class(params).step(None, ~norm.isfinite())
        with pytest.raises(DataDependentOutputException):
            float(norm)
