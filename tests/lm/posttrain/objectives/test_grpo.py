"""The objective of policy gradients against the update of one function."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lm.common.errors import UserError
from lm.eval.problems import Problem
from lm.model.transformer import TransformerLM
from lm.optim.sgd import SGD
from lm.posttrain.config import GRPOConfig, PPOConfig
from lm.posttrain.job import ObjectiveInputs
from lm.posttrain.losses.log_probs import get_response_log_probs
from lm.posttrain.objectives.grpo import GRPO, grpo_train_step
from tests.helpers.posttraining import (
    CHAT,
    PROBLEMS,
    UNEVEN_PROBLEMS,
    LetterReward,
    chat_policy,
    quick_config,
    wide_policy,
)


@pytest.fixture
def model() -> TransformerLM:
    return chat_policy()


def make_objective(model: TransformerLM, out: Path, problems: list[Problem] = PROBLEMS, **settings: Any) -> GRPO:
    train = quick_config(batch_size=8, gradient_accumulation_steps=settings.pop("gradient_accumulation_steps", 2))
    config = GRPOConfig(train=train, group_size=4, max_new_tokens=6, **settings)
    return GRPO(config, ObjectiveInputs(model, CHAT, problems, problems[:3], out=out), LetterReward())


def gradients(model: TransformerLM, objective: GRPO, step: int = 0) -> list[torch.Tensor]:
    """Return the gradients that the trainer would compute for a step."""
    model.zero_grad()
    batches = objective.micro_batches(step)
    divisor = sum(objective.weight(batch) for batch in batches)
    for batch in batches:
        (objective.loss_sum(model, batch) / divisor).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def functional_gradients(model: TransformerLM, objective: GRPO, **options: Any) -> list[torch.Tensor]:
    """Return the gradients of grpo_train_step with the same responses, from the change of a step of SGD."""
    rows = objective._responses
    before = [parameter.detach().clone() for parameter in model.parameters()]
    prompts, responses = ([f"{kind}{index}" for index in range(len(rows))] for kind in ("prompt", "response"))
    ids = dict(zip(prompts, (row.prompt_ids for row in rows), strict=True))
    ids |= dict(zip(responses, (row.ids for row in rows), strict=True))  # random bytes are seldom UTF-8
    rewards = dict(zip(responses, (row.rewards for row in rows), strict=True))
    tokenizer: Any = SimpleNamespace(encode=lambda text, add_special_tokens: ids[text], pad_token_id=0, eos_token_id=0)
    grpo_train_step(
        model, tokenizer, SGD(model.parameters(), lr=1.0), 1, None, lambda response, truth: rewards[response],
        prompts, responses, [None] * len(rows), 4, **options,
    )  # fmt: skip
    result = [old - new.detach() for old, new in zip(before, model.parameters(), strict=True)]
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), before, strict=True):
            parameter.copy_(value)
    return result


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {}),
        ({"advantage_normalizer": "none", "loss_normalization": "constant"},
         {"advantage_normalizer": "none", "loss_normalization": "constant", "normalization_constant": 48.0}),
        ({"advantage_normalizer": "mean", "baseline": "none"}, {"advantage_normalizer": "mean", "baseline": "none"}),
    ],
    ids=["grpo", "dr-grpo", "maxrl"],
)  # fmt: skip
def test_a_step_has_the_gradient_of_the_function(
    model: TransformerLM, tmp_path: Path, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    objective = make_objective(model, tmp_path, **settings)
    actual = gradients(model, objective)
    expected = functional_gradients(model, objective, **options)
    assert any(gradient.abs().max() > 1e-4 for gradient in expected)
    for gradient, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-3, atol=1e-5)


def test_token_normalization_divides_by_all_tokens(model: TransformerLM, tmp_path: Path) -> None:
    objective = make_objective(model, tmp_path, loss_normalization="token")
    actual = gradients(model, objective)
    tokens = float(sum(len(row.ids) for row in objective._responses))
    options = {"loss_normalization": "constant", "normalization_constant": tokens}
    for gradient, other in zip(actual, functional_gradients(model, objective, **options), strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("loss_normalization", ["sequence", "token", "constant"])
def test_responses_without_an_advantage_count_in_the_divisor(
    model: TransformerLM, tmp_path: Path, loss_normalization: str
) -> None:
    objective = make_objective(model, tmp_path, loss_normalization=loss_normalization)
    divisor = sum(float(batch.weight) for batch in objective.micro_batches(0))
    objective._advantages[:4] = 0.0
    batches = objective.split(list(range(8)))
    assert sum(len(batch.input_ids) for batch in batches) == 4, "the model does not run on them"
    assert sum(float(batch.weight) for batch in batches) == pytest.approx(divisor)


@pytest.mark.parametrize("kl_weight", [0.0, 0.5])
def test_expert_iteration_learns_the_good_responses_alone(
    model: TransformerLM, tmp_path: Path, kl_weight: float
) -> None:
    objective = make_objective(model, tmp_path, reward_threshold=0.4, loss_normalization="token", kl_weight=kl_weight)
    if objective.reference:  # other weights than the model's, so that the penalty has a gradient
        objective.reference = chat_policy(seed=1)
    actual = gradients(model, objective)
    good = [row for row in objective._responses if row.rewards["reward"] >= 0.4]
    assert 0 < len(good) < 8
    model.zero_grad()
    total = torch.zeros(())
    for row in good:
        ids = torch.tensor([row.prompt_ids + row.ids])
        log_probs = model(ids[:, :-1]).log_softmax(-1)[0].gather(-1, ids[0, 1:, None])
        total = total - log_probs[-len(row.ids) :].sum()
        if objective.reference:
            reference = objective.reference(ids[:, :-1]).log_softmax(-1)[0].gather(-1, ids[0, 1:, None]).detach()
            ratio = (reference - log_probs)[-len(row.ids) :]
            total = total + kl_weight * (ratio.exp() - ratio - 1).sum()
    (total / sum(len(row.ids) for row in good)).backward()
    for gradient, parameter in zip(actual, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("loss_normalization", ["sequence", "token", "constant"])
def test_processes_without_good_responses_do_not_change_the_divisor(
    model: TransformerLM, tmp_path: Path, loss_normalization: str
) -> None:
    objective = make_objective(model, tmp_path, reward_threshold=1.0, loss_normalization=loss_normalization)
    objective.micro_batches(0)
    objective._advantages = torch.tensor([1.0] * 2 + [0.0] * 6)
    one, first, second = (
        sum(float(batch.weight) for batch in objective.split(list(range(*bounds)))) for bounds in ((8,), (4,), (4, 8))
    )
    assert first + second == pytest.approx(one)
    assert second == 0


def test_unlikely_tokens_of_a_prompt_leave_no_nan_in_the_kl_penalty(model: TransformerLM, tmp_path: Path) -> None:
    with torch.no_grad():
        model.head_weight.mul_(400)
    objective = make_objective(model, tmp_path, kl_weight=0.1)
    batch = objective.micro_batches(0)[0]
    scores = get_response_log_probs(model, batch.input_ids, batch.labels, return_token_entropy=False)
    assert scores["log_probs"][~batch.mask].min() < -100  # exp of its absolute value overflows
    assert all(gradient.isfinite().all() for gradient in gradients(model, objective))


@pytest.mark.parametrize("method", ["noclip", "grpo", "gspo", "cispo"])
def test_later_updates_are_reweighted(model: TransformerLM, tmp_path: Path, method: str) -> None:
    objective = make_objective(
        model, tmp_path, importance_reweighting=method, updates_per_epoch=2, epochs_per_rollout=2, kl_weight=0.1
    )
    assert len(objective.micro_batches(0)[0].input_ids) == 4
    sampled = objective._responses
    assert len(sampled) == 16
    first = gradients(model, objective)
    metrics = objective.step_metrics()
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert metrics.get("clip_fraction", 0.0) == 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    used = [[*map(tuple, batch.input_ids.tolist())] for step in range(4) for batch in objective.micro_batches(step)]
    assert objective._responses is sampled
    assert len({row for batch in used for row in batch}) >= 15, "both epochs use all responses"
    later = gradients(model, objective, step=3)
    assert objective.step_metrics()["kl"] > 0
    assert not all(torch.allclose(a, b) for a, b in zip(first, later, strict=True))
    objective.micro_batches(4)
    assert objective._responses is not sampled


def loss_of_token(method: str, advantage: float, log_prob: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    """The losses of the papers, with the clip range of the test below."""
    if method == "none":
        return -advantage * log_prob
    if method == "noclip":
        return -advantage * ratio
    if method == "cispo":
        return -advantage * min(ratio.item(), 1.05) * log_prob
    bounded = min(max(ratio.item(), 0.98), 1.05)
    is_bounded = advantage * bounded < advantage * ratio.item()
    return -advantage * (torch.tensor(bounded) if is_bounded else ratio)


@pytest.mark.parametrize("method", ["none", "noclip", "grpo", "gspo", "cispo"])
def test_the_second_epoch_has_the_gradient_of_a_loop(model: TransformerLM, tmp_path: Path, method: str) -> None:
    objective = make_objective(
        model, tmp_path, importance_reweighting=method, epochs_per_rollout=2, clip_low=0.02, clip_high=0.05
    )
    objective.micro_batches(0)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    actual = gradients(model, objective, step=1)
    metrics = objective.step_metrics()
    assert method in ("none", "noclip") or 0.1 < metrics["clip_fraction"] < 0.9
    model.zero_grad()
    for row, advantage in zip(objective._responses, objective._advantages.tolist(), strict=True):
        logits = model(torch.tensor([[*row.prompt_ids, *row.ids][:-1]]))[0, len(row.prompt_ids) - 1 :]
        log_probs = torch.log_softmax(logits.float(), -1)[range(len(row.ids)), row.ids]
        ratios = (log_probs - torch.tensor(row.log_probs)).exp()
        if method == "gspo":
            ratios = ratios.log().mean().exp().expand(len(row.ids))
        losses = [loss_of_token(method, advantage, *pair) for pair in zip(log_probs, ratios, strict=True)]
        if (loss := torch.stack(losses).mean() / len(objective._responses)).requires_grad:  # not if all are clipped
            loss.backward()
    expected = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert any(gradient.abs().max() > 1e-4 for gradient in expected)
    for gradient, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", ["noclip", "grpo", "gspo", "cispo"])
def test_fresh_responses_have_the_ratio_1_in_bfloat16(model: TransformerLM, tmp_path: Path, method: str) -> None:
    """The decoder's log-probabilities differ from those of an update under autocast; the ratio must not."""
    objective = make_objective(model, tmp_path, importance_reweighting=method, clip_low=3e-4, clip_high=4e-4)
    with torch.autocast("cpu", torch.bfloat16):
        actual = gradients(model, objective)
    assert objective.step_metrics().get("clip_fraction", 0.0) == 0.0
    plain = replace(objective.config, importance_reweighting="none")  # the gradient at a ratio of 1
    objective.config = plain
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(model, objective)
    for gradient, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("method", ["noclip", "gspo"])
def test_old_log_probs_in_bfloat16_are_those_of_the_update_bit_for_bit(tmp_path: Path, method: str) -> None:
    """Products of another length round otherwise, so all batches of a rollout have one length."""
    model = wide_policy()
    options: dict[str, Any] = {"importance_reweighting": method, "kl_weight": 0.1, "epochs_per_rollout": 2}
    objective = make_objective(model, tmp_path, UNEVEN_PROBLEMS, **options)
    with torch.autocast("cpu", torch.bfloat16):
        batches = [*objective.micro_batches(0), *objective.micro_batches(1)]  # in another order
        scores = [get_response_log_probs(model, batch.input_ids, batch.labels, False)["log_probs"] for batch in batches]
    longest = max(len(row.prompt_ids) + len(row.ids) for row in objective._responses)
    assert [batch.input_ids.shape for batch in batches] == [(4, longest - 1)] * 4
    assert len({len(row.prompt_ids) for row in objective._responses}) == 2
    for batch, score in zip(batches, scores, strict=True):
        assert torch.equal(score[batch.mask], batch.old_log_probs[batch.mask])
        assert torch.equal(score[batch.mask], batch.reference_log_probs[batch.mask])


def test_a_step_without_any_signal_has_no_gradient(model: TransformerLM, tmp_path: Path) -> None:
    objective = make_objective(model, tmp_path)
    objective._sample = lambda verdicts: [  # type: ignore[method-assign]
        replace(row, rewards=dict.fromkeys(row.rewards, 1.0)) for row in GRPO._sample(objective, {})
    ]
    assert all(gradient.abs().max() == 0 for gradient in gradients(model, objective))
    assert objective.step_metrics()["groups_without_signal"] == 1.0


def test_bad_settings_and_prompts_are_named(model: TransformerLM, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"reinforce.train.batch_size 4 .* must be a multiple of reinforce.group_size 3"
    ):
        GRPOConfig(train=quick_config(), group_size=3)
    with pytest.raises(UserError, match=r"group_size is 1, so .* nothing is learned"):
        GRPOConfig(group_size=1, advantage_normalizer="none")
    with pytest.raises(UserError, match=r"baseline none does not work with .*standard deviation"):
        GRPOConfig(baseline="none")
    GRPOConfig(group_size=1, baseline="none", advantage_normalizer="none")
    GRPOConfig(group_size=1, reward_threshold=1.0)
    for method in (GRPOConfig, PPOConfig):
        with pytest.raises(UserError, match="There is no reward 'nope'"):
            method(rewards={"nope": 1.0})
    config = GRPOConfig(train=quick_config(), group_size=4)
    with pytest.raises(UserError, match="No prompt leaves room for a response; use a model"):
        GRPO(config, ObjectiveInputs(model, CHAT, [replace(PROBLEMS[0], prompt="x" * 301)], []), LetterReward())
    with pytest.raises(UserError, match="no problems to train on"):
        GRPO(config, ObjectiveInputs(model, CHAT, [], []), LetterReward())


@pytest.mark.parametrize("signals", [0, 1, 3, 8])
def test_each_step_has_all_micro_batches_whatever_has_a_signal(
    model: TransformerLM, tmp_path: Path, signals: int
) -> None:
    # All ranks need the same number: those of a mixture of experts add up their loads at each.
    objective = make_objective(model, tmp_path, gradient_accumulation_steps=4)
    objective.micro_batches(0)
    objective._advantages = torch.tensor([1.0] * signals + [0.0] * (8 - signals))
    batches = objective.split(list(range(8)))
    assert len(batches) == 4
    assert sum(float(batch.weight) for batch in batches) == pytest.approx(8)
    learned = [advantage for batch in batches for advantage in batch.advantages[batch.mask.any(-1)].tolist()]
    assert learned == [1.0] * signals
    losses = [objective.loss_sum(model, batch) for batch in batches]
    assert [bool(loss) for loss in losses].count(True) == min(signals, 4)
