"""The objective of PPO against plain sums over single responses, its stored rollouts, and its effect."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lm.common.execution import Execution
from lm.data.chat_template import END_TOKEN, encode_chat_prompt
from lm.data.dialogs import Message, PreferencePair
from lm.eval.problems import Problem
from lm.model.transformer import TransformerLM
from lm.posttrain.config import PPOConfig
from lm.posttrain.job import ObjectiveInputs
from lm.posttrain.losses.log_probs import score_labels
from lm.posttrain.losses.reward_model import add_reward_head, score_dialogs
from lm.posttrain.objectives.ppo import PPO
from lm.train.tracking import read_metrics
from lm.train.trainer import Trainer
from tests.helpers.posttraining import (
    CHAT,
    PAIRS,
    PROBLEMS,
    UNEVEN_PROBLEMS,
    LetterReward,
    chat_policy,
    quick_config,
    wide_policy,
)


def make_objective(model: TransformerLM, out: Path, problems: list[Problem] = PROBLEMS, **settings: Any) -> PPO:
    train = quick_config(batch_size=8, gradient_accumulation_steps=settings.pop("gradient_accumulation_steps", 2))
    options: dict[str, Any] = {"train": train, "max_new_tokens": 6, "epochs_per_rollout": 2, **settings}
    config = PPOConfig(**options)
    judge = add_reward_head(chat_policy(seed=5))
    return PPO(config, ObjectiveInputs(model, CHAT, problems, problems[:3], out=out), judge, LetterReward())


def add_value_head(model: TransformerLM) -> TransformerLM:
    model.add_scalar_head()
    return model


@pytest.fixture
def model() -> TransformerLM:
    policy = add_value_head(chat_policy())
    assert policy.scalar_head is not None
    torch.nn.init.normal_(policy.scalar_head.weight, std=0.1)  # at 0, no value could be wrong
    return policy


def gradients(model: TransformerLM, objective: PPO, step: int = 0) -> list[Tensor]:
    """Return the gradients that the trainer would compute for a step."""
    model.zero_grad()
    batches = objective.micro_batches(step)
    divisor = sum(objective.weight(batch) for batch in batches)
    for batch in batches:
        (objective.loss_sum(model, batch) / divisor).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def plain_loss(model: TransformerLM, old: TransformerLM, objective: PPO) -> Tensor:
    """Return the loss of an update, response by response. ``old`` is the model that made the responses."""
    config = objective.config
    advantages, targets, changes, values, old_values = [], [], [], [], []
    for row in objective._responses:
        ids = torch.tensor([row.prompt_ids + row.ids])
        start = len(row.prompt_ids) - 1
        log_prob, old_log_prob, reference_log_prob = (
            scorer(ids[:, :-1]).log_softmax(-1)[0].gather(-1, ids[0, 1:, None])[start:, 0]
            for scorer in (model, old, objective.reference)
        )
        value, old_value = (scorer.scalars(scorer.hidden_states(ids[:, :-1]))[0, start:] for scorer in (model, old))
        ended = [*row.prompt_ids, *row.ids]
        if row.ids[-1] != CHAT.special_ids[END_TOKEN]:
            ended.append(CHAT.special_ids[END_TOKEN])
        rewards = (-config.kl_weight * (old_log_prob - reference_log_prob)).detach()
        rewards[-1] += score_dialogs(objective.reward_model, [ended], 1)[0]
        errors = rewards + config.gamma * torch.cat([old_value[1:], torch.zeros(1)]) - old_value
        decay = config.gamma * config.gae_lambda
        discounted = [sum(decay**k * error for k, error in enumerate(errors[t:])) for t in range(len(errors))]
        advantages.append(torch.stack([torch.as_tensor(number) for number in discounted]).detach())
        targets.append(advantages[-1] + old_value.detach())
        changes.append(log_prob - old_log_prob.detach())
        values.append(value)
        old_values.append(old_value.detach())
    advantage, target = torch.cat(advantages), torch.cat(targets)
    advantage = (advantage - advantage.mean()) / advantage.std(correction=0)
    numbers = zip(advantage, torch.cat(changes).exp(), target, torch.cat(values), torch.cat(old_values), strict=True)
    return torch.stack([loss_of_token(config, *number) for number in numbers]).mean()


def loss_of_token(
    config: PPOConfig, advantage: Tensor, ratio: Tensor, target: Tensor, value: Tensor, old_value: Tensor
) -> Tensor:
    """Return the larger loss of policy and of value, with and without their clips."""
    clipped = min(max(ratio.item(), 1 - config.clip_low), 1 + config.clip_high)
    policy = -advantage * (clipped if advantage * clipped < advantage * ratio.item() else ratio)
    near = old_value + min(max((value - old_value).item(), -config.value_clip), config.value_clip)
    clipped_error, error = (near - target).square(), (value - target).square()
    return policy + config.value_weight * 0.5 * (clipped_error if clipped_error > error else error)


@pytest.mark.parametrize("settings", [{}, {"gamma": 0.9, "gae_lambda": 0.5, "value_weight": 2.0, "kl_weight": 0.0}])
def test_a_step_has_the_gradient_of_the_plain_loss(
    model: TransformerLM, tmp_path: Path, settings: dict[str, Any]
) -> None:
    objective = make_objective(model, tmp_path, **settings)
    objective.reference = chat_policy(seed=3)  # as if the policy had moved
    check_gradient(model, model, objective)


def check_gradient(model: TransformerLM, old: TransformerLM, objective: PPO, step: int = 0) -> None:
    actual = gradients(model, objective, step)
    model.zero_grad()
    plain_loss(model, old, objective).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    assert any(gradient is not None and gradient.abs().max() > 1e-3 for gradient in expected)
    for gradient, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=2e-3, atol=2e-5)


def test_the_second_epoch_has_the_gradient_of_the_plain_loss(model: TransformerLM, tmp_path: Path) -> None:
    objective = make_objective(model, tmp_path, clip_low=0.02, clip_high=0.05, value_clip=0.05)
    objective.micro_batches(0)
    old = deepcopy(model)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    check_gradient(model, old, objective, step=1)
    assert 0.1 < objective.step_metrics()["clip_fraction"] < 0.9


def test_an_unchanged_policy_has_no_kl_and_no_clipping_in_bfloat16(model: TransformerLM, tmp_path: Path) -> None:
    objective = make_objective(model, tmp_path, clip_low=3e-4, clip_high=4e-4, kl_weight=10.0)
    with torch.autocast("cpu", torch.bfloat16):
        gradients(model, objective)
    metrics = objective.step_metrics()
    assert metrics["reward_with_kl"] == pytest.approx(metrics["learned_reward"], abs=1e-9)
    assert metrics["clip_fraction"] == 0.0


def test_old_figures_in_bfloat16_are_those_of_the_update_bit_for_bit(tmp_path: Path) -> None:
    """Products of another length round otherwise, so all batches of a rollout have one length."""
    model = add_value_head(wide_policy())
    assert model.scalar_head is not None
    torch.nn.init.normal_(model.scalar_head.weight, std=0.1)
    objective = make_objective(model, tmp_path, [UNEVEN_PROBLEMS[0]] * 7 + UNEVEN_PROBLEMS[1:])
    with torch.autocast("cpu", torch.bfloat16):
        batches = [*objective.micro_batches(0), *objective.micro_batches(1)]  # in another order
        hidden_states = [model.hidden_states(batch.input_ids) for batch in batches]
        logits = [model.logits(hidden) for hidden in hidden_states]
        values = [model.scalars(hidden) for hidden in hidden_states]
    assert len({batch.input_ids.shape for batch in batches}) == 1
    assert len({len(row.prompt_ids) for row in objective._responses}) == 2
    for batch, logit, value in zip(batches, logits, values, strict=True):
        log_probs = score_labels(logit, batch.labels, return_token_entropy=False)["log_probs"]
        assert torch.equal(log_probs[batch.mask], batch.old_log_probs[batch.mask])
        assert torch.equal(log_probs[batch.mask], batch.reference_log_probs[batch.mask])
        assert torch.equal(value[batch.mask], batch.old_values[batch.mask])


def test_micro_batches_do_not_change_the_gradient(model: TransformerLM, tmp_path: Path) -> None:
    whole = gradients(model, make_objective(model, tmp_path, gradient_accumulation_steps=1))
    parts = gradients(model, make_objective(model, tmp_path, gradient_accumulation_steps=4))
    for gradient, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-3, atol=1e-5)


def test_every_epoch_uses_each_response_once(model: TransformerLM, tmp_path: Path) -> None:
    objective = make_objective(model, tmp_path, updates_per_epoch=2)
    steps = [[row for batch in objective.micro_batches(step) for row in batch.labels.tolist()] for step in range(4)]
    assert [len(rows) for rows in steps] == [8] * 4
    assert len(objective._responses) == 16
    texts = [sorted(str([token for token in row if token]) for rows in steps[start : start + 2] for row in rows)
             for start in (0, 2)]  # fmt: skip
    assert texts[0] == texts[1]


def test_a_resumed_training_uses_what_is_stored(model: TransformerLM, tmp_path: Path) -> None:
    objective = make_objective(model, tmp_path)
    objective.micro_batches(0)
    rows = read_metrics(tmp_path / "rollouts.jsonl")
    assert [row["step"] for row in rows] == [1] * 8
    resumed = make_objective(add_value_head(chat_policy(seed=1)), tmp_path)
    resumed.reward_model = add_reward_head(chat_policy(seed=2))  # other weights would give other numbers
    resumed.restore(tmp_path, 1)
    for batch, other in zip(resumed.micro_batches(1), objective.micro_batches(1), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(batch, other, strict=True))
    assert isinstance(resumed.reward, LetterReward) and resumed.reward.calls == 0


def test_every_response_is_judged_with_the_end_token(
    model: TransformerLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = make_objective(model, tmp_path)
    end, context_length = objective.end_id, objective.reward_model.config.context_length
    judged: list[list[int]] = []
    monkeypatch.setattr(
        "lm.posttrain.objectives.ppo.score_dialogs", lambda model, dialogs, size: judged.extend(dialogs)
    )
    prompt = [1] * (context_length - 4)
    objective._learned_rewards([(prompt, ids) for ids in ([2, 3], [2, end], [2, 3, 4, end], [2, 3, 4, 5])])
    assert judged == [prompt + ids for ids in ([2, 3, end], [2, end], [2, 3, 4, end], [2, 3, 4, end])]


def test_the_true_reward_is_logged_and_not_learned(model: TransformerLM, tmp_path: Path) -> None:
    objective = make_objective(model, tmp_path)
    with_reward = gradients(model, objective)
    metrics = objective.step_metrics()
    rows = objective._responses
    assert metrics["reward"] == pytest.approx(sum(row.rewards["reward"] for row in rows) / 8)
    assert metrics["learned_reward"] == pytest.approx(sum(row.learned_reward or 0 for row in rows) / 8)
    assert objective.metric_names == ("valid_learned_reward", "valid_reward", "valid_tokens")
    inputs = ObjectiveInputs(model, CHAT, PROBLEMS, PROBLEMS[:3], out=tmp_path)
    alone = PPO(objective.config, inputs, objective.reward_model, None)
    for gradient, other in zip(with_reward, gradients(model, alone), strict=True):
        torch.testing.assert_close(gradient, other)
    assert "reward" not in alone.step_metrics()
    assert alone.evaluate(model, is_final=True).keys() == {"valid_learned_reward", "valid_tokens"}


def test_prompts_of_pairs(model: TransformerLM, tmp_path: Path) -> None:
    messages = [Message(role="user", content="a"), Message(role="assistant", content="b")]
    dialog = PreferencePair((*messages, Message(role="user", content="c")), "x", "y")
    objective = make_objective(model, tmp_path)
    config = replace(objective.config, epochs_per_rollout=1)
    judge = objective.reward_model
    objective = PPO(config, ObjectiveInputs(model, CHAT, [*PAIRS, dialog], [], out=tmp_path), judge, None)
    for step in range(2):
        objective.micro_batches(step)
    assert objective.prompts[-1] == encode_chat_prompt(CHAT, dialog.prompt)
    assert len(read_metrics(tmp_path / "rollouts.jsonl")) == 16


def test_ppo_raises_the_learned_reward(tmp_path: Path) -> None:
    model = add_value_head(chat_policy())
    train = quick_config(steps=40, batch_size=32, max_lr=3e-2, eval_interval=40, checkpoint_interval=40)
    objective = make_objective(model, tmp_path, train=train, kl_weight=0.01, max_new_tokens=2)
    Trainer(train, model, objective, Execution(threads=1, device="cpu", compile=False), tmp_path).run()
    rewards = [row["learned_reward"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.15
