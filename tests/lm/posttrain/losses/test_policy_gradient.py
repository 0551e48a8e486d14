"""Losses per token and their aggregation against float64 loops, and the gradients that clipping leaves."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lm.common.errors import UserError
from lm.posttrain import (
    aggregate_loss_across_microbatch,
    compute_policy_gradient_loss,
    estimate_kl,
    masked_normalize,
)
from tests.helpers.tensors import FEW_EXAMPLES, random_normal, seeds

METHODS = ["none", "noclip", "grpo", "gspo", "cispo"]
CLIP_RANGES = [0.1, (0.2, 0.28), (0.0, 1.0)]


def reference_token_loss(
    advantage: float, log_prob: float, ratio: float, method: str, low: float, high: float
) -> tuple[float, bool]:
    """Return the loss of one token, and whether it is clipped."""
    if method == "none":
        return -advantage * log_prob, False
    if method == "noclip":
        return -advantage * ratio, False
    if method == "cispo":
        return -advantage * min(ratio, 1 + high) * log_prob, ratio > 1 + high
    objective = min(advantage * ratio, advantage * min(max(ratio, 1 - low), 1 + high))
    return -objective, objective < advantage * ratio


@FEW_EXAMPLES
@given(seeds, st.sampled_from(METHODS), st.sampled_from(CLIP_RANGES), st.booleans())
def test_loss_equals_the_reference(seed: int, method: Any, cliprange: Any, is_column: bool) -> None:
    log_probs, old = (random_normal(3, 4, seed=seed + i, scale=0.3).double() - 1 for i in range(2))
    advantages = random_normal(3, seed=seed + 2).double()
    mask = torch.rand(3, 4, generator=torch.Generator().manual_seed(seed)) < 0.7
    loss, metadata = compute_policy_gradient_loss(
        advantages[:, None] if is_column else advantages, log_probs, method, old, cliprange, mask
    )
    low, high = cliprange if isinstance(cliprange, tuple) else (cliprange, cliprange)
    clipped_tokens = []
    for row in range(3):
        counted = [float(log_probs[row, t] - old[row, t]) for t in range(4) if mask[row, t]]
        for t in range(4):
            log_ratio = float(log_probs[row, t] - old[row, t]) if mask[row, t] else 0.0
            if method == "gspo":
                log_ratio = sum(counted) / max(len(counted), 1)
            expected, is_clipped = reference_token_loss(
                float(advantages[row]), float(log_probs[row, t]), math.exp(log_ratio), method, low, high
            )
            assert loss[row, t].item() == pytest.approx(expected, abs=1e-12)
            if method != "none":
                assert metadata["is_clipped"][row, t].item() is is_clipped
                assert metadata["importance_ratio"][row, t].item() == pytest.approx(math.exp(log_ratio))
            clipped_tokens += [is_clipped] if mask[row, t] else []
    if method != "none" and clipped_tokens:
        assert metadata["clip_fraction"].item() == pytest.approx(sum(clipped_tokens) / len(clipped_tokens))


def gradient(method: Any, advantage: float, ratio: float, cliprange: Any = 0.2) -> float:
    """Return the gradient of the loss of a token with log-probability −1 for its log-probability."""
    log_prob = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    old = log_prob.detach() - math.log(ratio)
    mask = torch.ones(1, 1)
    loss, _ = compute_policy_gradient_loss(torch.tensor([advantage]), log_prob, method, old, cliprange, mask)
    loss.sum().backward()
    assert log_prob.grad is not None
    return log_prob.grad.item()


@pytest.mark.parametrize(
    ("method", "advantage", "ratio", "expected"),
    [
        *((method, 2.0, 1.0, -2.0) for method in METHODS),  # on-policy, all methods are the same
        *((method, -3.0, 1.0, 3.0) for method in METHODS),
        ("none", 2.0, 5.0, -2.0),
        ("noclip", 2.0, 5.0, -10.0),
        ("grpo", 2.0, 1.5, 0.0),  # good and likelier already
        ("grpo", 2.0, 0.5, -1.0),
        ("grpo", -2.0, 0.5, 0.0),  # bad and less likely already
        ("grpo", -2.0, 1.5, 3.0),
        ("gspo", 2.0, 1.5, 0.0),
        ("gspo", -2.0, 1.5, 3.0),
        ("cispo", 2.0, 1.5, -2.4),  # bounded, not removed
        ("cispo", 2.0, 0.5, -1.0),
        ("cispo", -2.0, 1.5, 2.4),
    ],
)
def test_hand_worked_gradients(method: Any, advantage: float, ratio: float, expected: float) -> None:
    assert gradient(method, advantage, ratio) == pytest.approx(expected)


def test_the_upper_clip_can_be_wider() -> None:
    assert gradient("grpo", 1.0, 1.25, 0.2) == 0.0
    assert gradient("grpo", 1.0, 1.25, (0.2, 0.28)) == pytest.approx(-1.25)
    assert gradient("grpo", -1.0, 0.75, [0.2, 0.28]) == 0.0
    assert gradient("cispo", 1.0, 1.5, (0.2, 0.28)) == pytest.approx(-1.28)


def test_masked_tokens_with_extreme_ratios_leave_no_nan() -> None:
    log_probs = torch.tensor([[-1.0, 0.0], [-2.0, 0.0]], requires_grad=True)
    old, mask = torch.tensor([[-1.0, -1e30], [-2.0, math.nan]]), torch.tensor([[1, 0], [1, 0]])
    for method in ("noclip", "grpo", "gspo", "cispo"):
        loss, _ = compute_policy_gradient_loss(torch.tensor([0.0, 1.0]), log_probs, method, old, 0.2, mask)
        total = aggregate_loss_across_microbatch(loss, mask)
        (grad,) = torch.autograd.grad(total, log_probs)
        assert total.isfinite() and torch.equal(grad, torch.tensor([[0.0, 0.0], [-0.5, 0.0]])), method


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"importance_reweighting_method": "ppo"}, "'ppo'; it must be none or noclip or grpo or gspo or cispo"),
        ({"old_log_probs": None}, "grpo needs old_log_probs"),
        ({"cliprange": None}, "grpo needs a cliprange of at least 0, or a pair .*; it is None"),
        ({"cliprange": (0.2, -0.1)}, r"it is \(0.2, -0.1\)"),
        ({"cliprange": (0.2,)}, r"or a pair \(low, high\); it is \(0.2,\)"),
        ({"importance_reweighting_method": "gspo"}, "gspo needs the response_mask"),
    ],
)
def test_invalid_arguments_are_refused(changed: dict[str, Any], message: str) -> None:
    log_probs = torch.zeros(1, 2)
    defaults = {"importance_reweighting_method": "grpo", "old_log_probs": log_probs, "cliprange": 0.2}
    arguments: dict[str, Any] = {**defaults, **changed}
    with pytest.raises(UserError, match=message):
        compute_policy_gradient_loss(torch.ones(1), log_probs, **arguments)


LOSSES = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0], [5.0, 5.0, math.nan]])


@pytest.mark.parametrize("mask", [[[1, 1, 0], [0, 0, 1], [0, 0, 0]], [[0, 1, 1], [1, 0, 0], [0, 0, 0]]])
def test_hand_worked_aggregation(mask: list[list[int]]) -> None:
    """Padding on the right and on the left, a one-token answer, and a row without a response."""
    rows = [[loss for loss, keep in zip(*row, strict=True) if keep] for row in zip(LOSSES.tolist(), mask, strict=True)]
    by_sequence = sum(sum(row) / len(row) for row in rows if row) / 3
    total = sum(sum(row) for row in rows)
    for kind in (torch.bool, torch.int64, torch.float32):
        mask_tensor = torch.tensor(mask).to(kind)
        assert aggregate_loss_across_microbatch(LOSSES, mask_tensor).item() == pytest.approx(by_sequence)
        constant = aggregate_loss_across_microbatch(LOSSES, mask_tensor, "constant", 42)
        assert constant.item() == pytest.approx(total / 42)


@pytest.mark.parametrize("lengths", [[1, 2, 8], [4, 4, 4], [1, 1, 1]])
def test_weight_of_a_token_by_the_length_of_its_answer(lengths: list[int]) -> None:
    """1 / (rows · length) with sequence normalization, the same for every token with a constant."""
    mask = torch.arange(8) < torch.tensor(lengths)[:, None]
    weights = {}
    for normalization, constant in (("sequence", None), ("constant", 24.0)):
        losses = torch.zeros(3, 8, dtype=torch.float64, requires_grad=True)
        aggregate_loss_across_microbatch(losses, mask, normalization, constant).backward()  # type: ignore[arg-type]
        weights[normalization] = losses.grad
    expected = mask.double() / (3 * torch.tensor(lengths).double()[:, None])
    torch.testing.assert_close(weights["sequence"], expected)
    torch.testing.assert_close(weights["constant"], mask.double() / 24)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("constant",), "needs a normalization_constant"), (("constant", 0), "other than 0"), (("token",), "'token'")],
)
def test_invalid_normalization_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        aggregate_loss_across_microbatch(LOSSES, torch.ones(3, 3), *arguments)


def test_kl_estimate() -> None:
    policy, reference = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()
    estimates = estimate_kl(policy.log(), reference.log())
    exact = sum(p * math.log(p / q) for p, q in zip(policy.tolist(), reference.tolist(), strict=True))
    assert (policy * estimates).sum().item() == pytest.approx(exact)  # without bias
    assert (estimates >= 0).all()
    same = torch.tensor([-3.0, -1e-4])
    assert estimate_kl(same, same).tolist() == [0.0, 0.0]


def test_kl_gradient_at_equal_models_is_zero() -> None:
    policy: Tensor = torch.tensor([-1.0], requires_grad=True)
    estimate_kl(policy, policy.detach()).sum().backward()
    assert policy.grad is not None and policy.grad.item() == 0.0


def test_kl_of_masked_tokens_leaves_no_nan() -> None:
    policy = torch.tensor([-200.0, -1.0, math.nan], requires_grad=True)
    mask = torch.tensor([False, True, False])
    estimates = estimate_kl(policy, torch.tensor([0.0, -1.5, 0.0]), mask)
    (grad,) = torch.autograd.grad(masked_normalize(estimates, mask), policy)
    assert estimates.tolist() == pytest.approx([0.0, math.exp(-0.5) - 0.5, 0.0])
    assert grad.tolist() == pytest.approx([0.0, 1 - math.exp(-0.5), 0.0])
