"""AdamW against torch's."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.optim.adamw import AdamW, _load_kernel, _update
from tests.helpers.optimizers import SHAPES, assert_all_close, make_parameters, set_gradients
from tests.helpers.tensors import FEW_EXAMPLES


@FEW_EXAMPLES
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
    params, expected = make_parameters(SHAPES), make_parameters(SHAPES)
    optimizer, torch_optimizer = AdamW(params, **options), torch.optim.AdamW(expected, **options)
    for step in range(40):
        set_gradients(params, step, missing)
        set_gradients(expected, step, missing)
        optimizer.step()
        torch_optimizer.step()
    assert_all_close(params, expected, atol=1e-5, rtol=1e-5)


def test_a_skipped_first_step_changes_nothing_without_eps() -> None:
    """The second moments are 0, and so is each denominator."""
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), torch.nan)
    AdamW([parameter], eps=0.0).step(None, torch.tensor(True))
    assert parameter.tolist() == [1.0] * 3


@pytest.mark.skipif(not find_spec("triton"), reason="the extra triton is not installed")
@FEW_EXAMPLES
@given(
    beta1=st.sampled_from([0.0, 0.9]),
    weight_decay=st.sampled_from([0.0, 0.3]),
    is_cautious=st.booleans(),
    size=st.sampled_from([0, 1, 100, 2048, 5000]),
    step=st.integers(1, 50),
    is_skipped=st.booleans(),
)
def test_the_kernel_of_gpus_equals_the_lists(
    beta1: float, weight_decay: float, is_cautious: bool, size: int, step: int, is_skipped: bool
) -> None:
    """Without a GPU, in Triton's interpreter. A skipped step changes nothing, whatever the gradient."""
    from lm.optim.adamw_triton import update

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = torch.randn(4, size, generator=torch.Generator().manual_seed(step), dtype=torch.float32).to(device)
    tensors[3].square_()
    if is_skipped:
        tensors[1].fill_(torch.nan)
    rows = [tuple(tensors.clone()) for _ in range(2)]
    group = {"lr": 0.01, "betas": (beta1, 0.95), "eps": 1e-8, "weight_decay": weight_decay, "is_cautious": is_cautious}
    found_inf = torch.tensor(is_skipped, device=device)
    update(rows[0], step, group, (~found_inf).float())
    params, grads, m, v = ([x] for x in rows[1])
    _update(params, grads, m, v, step, group, found_inf)
    for index in (0, 2, 3):
        torch.testing.assert_close(rows[0][index], rows[1][index], rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not find_spec("triton"), reason="the extra triton is not installed")
def test_a_kernel_that_does_not_compile_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("Failed to find C compiler.\nMore")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _load_kernel.cache_clear()
    assert _load_kernel(device) is not None
    _load_kernel.cache_clear()
    monkeypatch.setattr("lm.optim.adamw_triton.update", fail)
    assert _load_kernel(device) is None
    _load_kernel.cache_clear()
    assert "AdamW updates without it: Failed to find C compiler.\n" in caplog.text


def test_defaults_are_those_of_torch() -> None:
    defaults = AdamW(make_parameters([(2,)])).defaults
    torch_defaults = torch.optim.AdamW(make_parameters([(2,)])).defaults
    assert defaults == {key: torch_defaults.get(key, False) for key in defaults}


def test_first_step_by_hand() -> None:
    """After bias correction the first step is lr · sign(grad), plus weight decay."""
    p = torch.tensor([2.0, -3.0], requires_grad=True)
    p.grad = torch.tensor([0.5, -40.0])
    AdamW([p], lr=0.1, weight_decay=0.2).step()
    torch.testing.assert_close(p.detach(), torch.tensor([2.0 * 0.98 - 0.1, -3.0 * 0.98 + 0.1]))


def test_groups_have_their_own_options() -> None:
    params, expected = make_parameters([(3,), (2, 2)]), make_parameters([(3,), (2, 2)])
    optimizers = [
        optimizer_class([{"params": p[:1], "lr": 0.1}, {"params": p[1:], "weight_decay": 0.5}], lr=0.01)
        for optimizer_class, p in ((AdamW, params), (torch.optim.AdamW, expected))
    ]
    for step in range(10):
        set_gradients(params, step)
        set_gradients(expected, step)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)  # as a schedule does
            optimizer.step()
    assert_all_close(params, expected, atol=1e-6, rtol=1e-5)
