"""One update of a policy: against one plain backward pass, and whatever the split into micro-batches."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lm.common.errors import UserError
from lm.optim import AdamW
from lm.posttrain import (
    aggregate_loss_across_microbatch,
    compute_group_normalized_rewards,
    compute_policy_gradient_loss,
    get_response_log_probs,
    grpo_train_step,
    tokenize_prompt_and_output,
)
from tests.helpers.policies import BYTES, LogitsOutput, make_policy
from tests.helpers.tensors import random_normal

PROMPTS = ["1+1="] * 3 + ["2+2="] * 3 + ["3+3="] * 3
RESPONSES = ["2", "two", "", "four", "4", "44444444", "9", "8", "777"]
TRUTHS = ["2"] * 3 + ["4"] * 3 + ["6"] * 3  # the last group gets no reward


def exact(response: str, truth: str) -> dict[str, float]:
    value = float(response == truth)
    return {"reward": value, "format_reward": float(bool(response)), "answer_reward": value}


def step(model: nn.Module, **options: Any) -> tuple[Tensor, dict[str, Any]]:
    arguments: dict[str, Any] = {
        "gradient_accumulation_steps": 1,
        "max_grad_norm": None,
        "reward_fn": exact,
        "repeated_prompts": PROMPTS,
        "rollout_responses": RESPONSES,
        "repeated_ground_truths": TRUTHS,
        "group_size": 3,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    return grpo_train_step(model, BYTES, **(arguments | options))


def plain_step(model: nn.Module, **options: Any) -> tuple[float, list[Tensor]]:
    """Return the loss and the gradients of the whole batch at once, without leaving out any response."""
    batch = tokenize_prompt_and_output(PROMPTS, RESPONSES, BYTES)
    rewards = torch.tensor([exact(*pair)["reward"] for pair in zip(RESPONSES, TRUTHS, strict=True)]).double()
    advantages, _ = compute_group_normalized_rewards(
        rewards, 3, options.get("baseline", "mean"), 1e-6, options.get("advantage_normalizer", "std")
    )
    scores = get_response_log_probs(model, batch["input_ids"], batch["labels"], return_token_entropy=False)
    losses, _ = compute_policy_gradient_loss(
        advantages,
        scores["log_probs"],
        options.get("importance_reweighting_method", "none"),
        options.get("old_log_probs"),
        options.get("cliprange"),
        batch["response_mask"],
    )
    loss = aggregate_loss_across_microbatch(
        losses,
        batch["response_mask"],
        options.get("loss_normalization", "sequence"),
        options.get("normalization_constant"),
    )
    return loss.item(), list(torch.autograd.grad(loss, list(model.parameters())))


OLD_LOG_PROBS = random_normal(*tokenize_prompt_and_output(PROMPTS, RESPONSES, BYTES)["labels"].shape).double() / 5 - 5.5


@pytest.mark.parametrize("parts", [1, 2, 4, 9, 100])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"baseline": "mean", "advantage_normalizer": "none", "loss_normalization": "constant"},
        {"baseline": "none", "advantage_normalizer": "none", "loss_normalization": "constant"},
        {"advantage_normalizer": "mean"},
        {"importance_reweighting_method": "noclip", "old_log_probs": OLD_LOG_PROBS},
        {"importance_reweighting_method": "grpo", "old_log_probs": OLD_LOG_PROBS, "cliprange": (0.1, 0.2)},
        {"importance_reweighting_method": "gspo", "old_log_probs": OLD_LOG_PROBS, "cliprange": 0.05},
        {"importance_reweighting_method": "cispo", "old_log_probs": OLD_LOG_PROBS, "cliprange": 0.1},
    ],
    ids=["grpo", "dr_grpo", "rft", "maxrl", "noclip", "clip_higher", "gspo", "cispo"],
)
def test_loss_and_update_equal_those_of_one_plain_pass(options: dict[str, Any], parts: int) -> None:
    if options.get("loss_normalization") == "constant":
        options = options | {"normalization_constant": 70}
    expected_loss, gradients = plain_step(make_policy(dtype=torch.float64), **options)
    model = make_policy(dtype=torch.float64)
    before = [p.detach().clone() for p in model.parameters()]
    loss, metadata = step(LogitsOutput(model), gradient_accumulation_steps=parts, **options)
    assert loss.item() == pytest.approx(expected_loss, abs=1e-6) and not loss.requires_grad
    for parameter, old, gradient in zip(model.parameters(), before, gradients, strict=True):
        torch.testing.assert_close(parameter.detach(), old - 0.1 * gradient, atol=1e-7, rtol=1e-6)
        assert parameter.grad is None
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
    assert float(metadata["grad_norm"]) == pytest.approx(norm, rel=1e-5)


def test_metadata() -> None:
    model = make_policy()
    batch = tokenize_prompt_and_output(PROMPTS, RESPONSES, BYTES)
    scores = get_response_log_probs(model, batch["input_ids"], batch["labels"], return_token_entropy=True)
    _, metadata = step(model)
    assert metadata["reward_mean"] == pytest.approx(2 / 9)
    assert metadata["format_reward_mean"] == pytest.approx(8 / 9)
    assert metadata["groups_without_signal"] == pytest.approx(1 / 3)
    assert metadata["response_tokens"] == pytest.approx(sum(map(len, RESPONSES)) / 9)
    mask = batch["response_mask"].clone()
    mask[6:] = False  # the group without a signal
    assert float(metadata["token_entropy"]) == pytest.approx(float(scores["token_entropy"][mask].mean()), rel=1e-5)
    assert float(metadata["clip_fraction"]) == 0.0


def test_clip_fraction_of_all_micro_batches() -> None:
    model = make_policy(dtype=torch.float64)
    options = {"importance_reweighting_method": "grpo", "old_log_probs": OLD_LOG_PROBS, "cliprange": 0.01}
    fractions = [
        float(step(make_policy(dtype=torch.float64), gradient_accumulation_steps=parts, **options)[1]["clip_fraction"])
        for parts in (1, 3)
    ]
    assert fractions[0] == pytest.approx(fractions[1]) and 0 < fractions[0] < 1
    assert next(model.parameters()).grad is None


def test_gradients_are_clipped() -> None:
    model, free = make_policy(), make_policy()
    before = [p.detach().clone() for p in model.parameters()]
    _, metadata = step(model, max_grad_norm=0.01)
    _, free_metadata = step(free)
    assert float(metadata["grad_norm"]) == pytest.approx(float(free_metadata["grad_norm"]))
    assert metadata["grad_norm"] > 0.01
    moves = [(p.detach() - old).square().sum().item() for p, old in zip(model.parameters(), before, strict=True)]
    moved = math.sqrt(sum(moves))
    assert moved == pytest.approx(0.1 * 0.01, rel=1e-3)


def test_without_any_signal_nothing_changes() -> None:
    """Momentum and weight decay do not move the model either, and it does not run."""
    model = make_policy()
    optimizer = AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    before = [p.detach().clone() for p in model.parameters()]
    model.forward = None  # type: ignore[method-assign, assignment]
    loss, metadata = step(model, optimizer=optimizer, repeated_ground_truths=["none"] * 9)
    assert loss.item() == 0.0 and metadata["groups_without_signal"] == 1.0
    assert float(metadata["grad_norm"]) == float(metadata["token_entropy"]) == 0.0
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)


def test_steps_raise_the_reward() -> None:
    model = make_policy()
    optimizer = AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    batch = tokenize_prompt_and_output(PROMPTS, RESPONSES, BYTES)

    def log_prob(row: int) -> float:
        scores = get_response_log_probs(model, batch["input_ids"], batch["labels"], return_token_entropy=False)
        return scores["log_probs"][row][batch["response_mask"][row]].sum().item()

    right, wrong = log_prob(0), log_prob(1)
    for _ in range(5):
        step(model, optimizer=optimizer)
    assert log_prob(0) > right + 0.1 and log_prob(1) < wrong


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps is 0"),
        ({"group_size": 2}, "9 rewards are not a multiple of group_size 2"),
        ({"old_log_probs": torch.zeros(9, 2)}, r"old_log_probs are \(9, 2\), the labels \(9, 11\)"),
        ({"rollout_responses": ["2"]}, "9 prompts and 1 outputs"),
        ({"repeated_prompts": ["x" * 300] * 9}, "does not fit the model's context"),
        ({"loss_normalization": "constant"}, "needs a normalization_constant"),
    ],
)
def test_invalid_arguments_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        step(make_policy(), **changed)
