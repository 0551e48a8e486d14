"""The Bradley–Terry loss, the head of a reward model, and its training."""

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.checkpoint.training_checkpoint import load_model
from lm.common.errors import UserError
from lm.common.execution import Execution
from lm.data.dialogs import PreferencePair
from lm.model.transformer import TransformerLM
from lm.posttrain.config import RewardModelConfig
from lm.posttrain.job import ObjectiveInputs
from lm.posttrain.losses.reward_model import (
    add_reward_head,
    bradley_terry_loss,
    compute_rewards,
    score_dialogs,
)
from lm.posttrain.objectives.reward_model import RewardModeling
from lm.train.trainer import Trainer
from tests.helpers.posttraining import CHAT, PAIRS, chat_policy, pair, quick_config

REWARDS = st.lists(st.tuples(*[st.floats(-20, 20)] * 2), min_size=1, max_size=5)


@given(rewards=REWARDS, center_weight=st.floats(0, 1))
def test_the_loss_and_its_gradient(rewards: list[tuple[float, float]], center_weight: float) -> None:
    pairs = torch.tensor(rewards, dtype=torch.float64, requires_grad=True)
    loss = bradley_terry_loss(pairs[:, 0], pairs[:, 1], center_weight)
    loss.sum().backward()
    a, b = np.array(rewards).T
    expected = np.logaddexp(0, b - a) + center_weight * (a + b) ** 2
    np.testing.assert_allclose(loss.detach().numpy(), expected, rtol=1e-12, atol=1e-12)
    wrong = 1 / (1 + np.exp(a - b))  # probability that the worse answer wins
    center = 2 * center_weight * (a + b)
    assert pairs.grad is not None
    np.testing.assert_allclose(pairs.grad.numpy(), np.stack([center - wrong, center + wrong], -1), rtol=1e-9, atol=1e-9)


def test_the_loss_equals_that_of_trl(tmp_path: Path) -> None:
    trainer_type = pytest.importorskip("trl", reason="the reference").RewardTrainer
    rewards = torch.tensor([[0.3], [1.5], [-0.4], [-1.0], [1.4], [0.2]], dtype=torch.float64)
    trainer: Any = SimpleNamespace(
        model=torch.nn.Identity(),
        args=SimpleNamespace(center_rewards_coefficient=0.05),
        accelerator=SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x),
        _total_train_tokens=0,
        _tp_size=1,
        _metrics={"train": defaultdict(list)},
    )
    inputs = {"attention_mask": torch.ones(6, 1)}
    theirs = trainer_type.compute_loss(trainer, lambda **_: SimpleNamespace(logits=rewards), inputs)
    chosen, rejected = rewards.squeeze(-1).chunk(2)
    torch.testing.assert_close(bradley_terry_loss(chosen, rejected, 0.05).mean(), theirs)


def test_a_reward_is_read_at_the_last_token_whatever_follows() -> None:
    model = add_reward_head(chat_policy())
    rows = [[1, 2, 3, 4, 5], [6, 7], [8]]
    alone = [score_dialogs(model, [row], 1)[0] for row in rows]
    assert score_dialogs(model, rows, 2) == pytest.approx(alone, abs=1e-6)
    assert model.scalar_head is not None
    with torch.no_grad():
        expected = model.hidden_states(torch.tensor([rows[0]]))[0, -1] @ model.scalar_head.weight
    assert alone[0] == pytest.approx(expected.item(), abs=1e-6)
    ids, mask = torch.tensor([[6, 7, 9, 9]]), torch.tensor([[False, True, False, False]])
    assert compute_rewards(model, ids, mask).item() == pytest.approx(alone[1], abs=1e-6)
    with pytest.raises(UserError, match="does not fit the model's context"):
        score_dialogs(model, [[0] * 257], 1)


def length_pairs(count: int, first: int) -> list[PreferencePair]:
    """Pairs whose shorter answer is better."""
    return [pair(f"say {n}", "ab"[n % 2] * (1 + n % 3), "ba"[n % 2] * (5 + n % 4)) for n in range(first, first + count)]


def train_reward_model(out: Path, train: list[PreferencePair], valid: list[PreferencePair]) -> dict[str, float]:
    config = RewardModelConfig(
        train=quick_config(steps=40, batch_size=8, max_lr=3e-3, eval_interval=20, checkpoint_interval=40)
    )
    model = add_reward_head(chat_policy())
    objective = RewardModeling(config, ObjectiveInputs(model, CHAT, train, valid))
    return Trainer(config.train, model, objective, Execution(threads=1, device="cpu", compile=False), out).run()


def test_a_reward_model_learns_a_preference(tmp_path: Path) -> None:
    result = train_reward_model(tmp_path, length_pairs(32, 0), length_pairs(16, 100))
    assert result["valid_accuracy"] > 0.9 and result["valid_margin"] > 1
    best = tmp_path / str(result["best"])
    assert (best / "head.safetensors").exists()
    model = load_model(best, has_scalar_head=True)
    objective = RewardModeling(RewardModelConfig(), ObjectiveInputs(model, CHAT, length_pairs(32, 0), []))
    batch = objective.make_batch(range(32))
    rewards = compute_rewards(model, batch.ids, batch.mask)
    chosen, rejected = rewards.chunk(2)
    assert (chosen > rejected).float().mean() > 0.9
    assert abs(rewards.mean()) < 0.5 * (chosen - rejected).mean(), "rewards are centered"


def test_the_head_is_beside_the_model(tmp_path: Path) -> None:
    result = train_reward_model(tmp_path, PAIRS, [])
    last = tmp_path / str(result["last"])
    trained = load_model(last, has_scalar_head=True)
    plain = load_model(last)
    assert plain.scalar_head is None
    names = plain.state_dict().keys()
    assert trained.state_dict().keys() - names == {"scalar_head.weight", "scalar_head.bias"}
    assert isinstance(plain, TransformerLM) and torch.equal(plain.lm_head.weight, chat_policy().lm_head.weight)  # type: ignore[union-attr]
    (last / "head.safetensors").unlink()
    with pytest.raises(UserError, match="is not an intact checkpoint"):
        load_model(last, has_scalar_head=True)
