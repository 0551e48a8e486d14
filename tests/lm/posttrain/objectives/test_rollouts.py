"""Rollouts of the objective of GRPO: sampled, judged, stored and used again."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lm.common.errors import UserError
from lm.data.chat_template import END_TOKEN, encode_chat_prompt
from lm.eval.problems import Problem
from lm.eval.reward_worker import Verdict
from lm.model.transformer import TransformerLM
from lm.posttrain.config import GRPOConfig
from lm.posttrain.job import ObjectiveInputs
from lm.posttrain.losses.log_probs import get_response_log_probs
from lm.posttrain.objectives.grpo import GRPO
from lm.train.tracking import read_metrics
from tests.helpers.full_disk import full_disk
from tests.helpers.posttraining import CHAT, PROBLEMS, LetterReward, chat_policy, quick_config
from tests.lm.posttrain.objectives.test_grpo import make_objective


@pytest.fixture
def model() -> TransformerLM:
    return chat_policy()


def test_responses_have_the_probabilities_of_the_model(model: TransformerLM, tmp_path: Path) -> None:
    objective = make_objective(model, tmp_path)
    objective.micro_batches(0)
    end = CHAT.special_ids[END_TOKEN]
    for row in objective._responses:
        ids = torch.tensor([row.prompt_ids + row.ids])
        scores = get_response_log_probs(model, ids[:, :-1], ids[:, 1:], return_token_entropy=False)["log_probs"]
        torch.testing.assert_close(scores[0, -len(row.ids) :], torch.tensor(row.log_probs), rtol=1e-4, atol=1e-4)
        assert row.prompt_ids == encode_chat_prompt(CHAT, [{"role": "user", "content": PROBLEMS[row.problem].prompt}])
        assert len(row.ids) == 6 or row.ids[-1] == end
        assert row.text == CHAT.decode([token for token in row.ids if token != end])
    groups = [objective._responses[start : start + 4] for start in (0, 4)]
    assert [len({row.problem for row in group}) for group in groups] == [1, 1]


def test_numbers_that_are_not_finite_are_a_user_error(model: TransformerLM, tmp_path: Path) -> None:
    objective = make_objective(model, tmp_path)
    sample = objective._sample

    def sample_diverged(verdicts: Any) -> Any:
        rows = sample(verdicts)
        rows[3].log_probs[0] = float("nan")
        return rows

    objective._sample = sample_diverged  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"At step 1 the model gives .* the training has diverged"):
        objective.micro_batches(0)
    assert not (tmp_path / "rollouts.jsonl").exists()


def test_a_resumed_training_uses_the_stored_responses(model: TransformerLM, tmp_path: Path) -> None:
    objective = make_objective(model, tmp_path, updates_per_epoch=2)
    objective.micro_batches(0)
    rows = read_metrics(tmp_path / "rollouts.jsonl")
    assert [row["step"] for row in rows] == [1] * 16
    resumed = make_objective(chat_policy(seed=1), tmp_path, updates_per_epoch=2)
    resumed.restore(tmp_path, 1)
    resumed.micro_batches(1)  # in the middle of a rollout: other weights would give other responses
    assert resumed._responses == objective._responses
    assert isinstance(resumed.reward, LetterReward) and resumed.reward.calls == 0
    again = make_objective(model, tmp_path, updates_per_epoch=2)
    again.restore(tmp_path, 0)
    again.micro_batches(0)  # sampled again, but judged as before
    assert again._responses == objective._responses
    assert isinstance(again.reward, LetterReward) and again.reward.calls == 0


def test_rollouts_that_cannot_be_written_are_a_user_error(model: TransformerLM, tmp_path: Path) -> None:
    objective = make_objective(model, tmp_path)
    with full_disk(100), pytest.raises(UserError, match=r"rollouts\.jsonl cannot be written: File too large"):
        objective.micro_batches(0)


def test_a_resumed_training_keeps_no_past_responses(model: TransformerLM, tmp_path: Path) -> None:
    objective = make_objective(model, tmp_path, updates_per_epoch=2)
    for step in (0, 2, 4, 6):
        objective.micro_batches(step)
    with (tmp_path / "rollouts.jsonl").open("a") as file:
        file.write('{"step": 9, "ids": [')  # cut off by a crash
    resumed = make_objective(model, tmp_path, updates_per_epoch=2)
    resumed.restore(tmp_path, 3)
    assert resumed._stored.keys() == {2, 4, 6}, "the rollout of step 3, and later ones for their verdicts"
    resumed.micro_batches(3)
    assert resumed._stored.keys() == {4, 6}
    resumed.micro_batches(4)
    assert resumed._stored.keys() == {6}
    assert isinstance(resumed.reward, LetterReward) and resumed.reward.calls == 0


class FailingReward(LetterReward):
    """Fails for all responses but the first ``successes``."""

    def __init__(self, successes: int) -> None:
        super().__init__()
        self.successes = successes

    def score(self, response: str, ground_truth: Any) -> Verdict:
        if self.calls >= self.successes:
            return Verdict(dict.fromkeys(("reward", "format_reward", "answer_reward"), 0.0), "TypeError: no number")
        return super().score(response, ground_truth)


def test_a_reward_that_fails_is_told_and_one_that_always_fails_ends_the_training(
    model: TransformerLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    objective = make_objective(model, tmp_path)
    objective.reward = FailingReward(successes=3)
    objective.micro_batches(0)
    assert "failed for 5 of 8 responses of a rollout, which get 0: TypeError: no number" in caplog.text
    with pytest.raises(UserError, match=r"failed for all 8 responses of a rollout: TypeError: no number\. Name a"):
        objective.micro_batches(1)


def test_failed_rewards_are_computed_again_by_the_next_attempt(model: TransformerLM, tmp_path: Path) -> None:
    objective = make_objective(model, tmp_path)
    objective.reward = FailingReward(successes=3)
    objective.micro_batches(0)
    with pytest.raises(UserError, match="failed for all 8 responses"):
        objective.micro_batches(1)
    again = make_objective(model, tmp_path)
    again.restore(tmp_path, 0)
    for step in (0, 1):
        again.micro_batches(step)
        assert all(row.error is None for row in again._responses)
    assert isinstance(again.reward, LetterReward) and again.reward.calls == 5 + 8


def test_prompts_that_leave_no_room_are_left_out(
    model: TransformerLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = GRPOConfig(train=quick_config(), group_size=4)
    problems = [Problem("x" * 300, ["x"]), *PROBLEMS]
    objective = GRPO(config, ObjectiveInputs(model, CHAT, problems, problems), LetterReward())
    assert objective.train == objective.valid == PROBLEMS
    assert "1 of 9 prompts leave no room for a response in the model's context of 256 tokens" in caplog.text
