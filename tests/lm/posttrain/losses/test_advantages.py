"""Rewards of rollouts and advantages within groups, against loops and hand-worked cases."""

import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.posttrain import compute_group_normalized_rewards, compute_rollout_rewards
from tests.helpers.tensors import FEW_EXAMPLES


def reward_of_length(response: str, ground_truth: Any) -> dict[str, float]:
    if response == "raise":
        raise RecursionError("too deep")
    value = math.nan if response == "nan" else len(response) / 10
    return {"reward": value, "format_reward": 1.0, "answer_reward": value * ground_truth}


def test_rewards_and_their_statistics() -> None:
    rewards, metadata = compute_rollout_rewards(reward_of_length, ["", "ab", "abcd"], [1, 1, 2])
    torch.testing.assert_close(rewards, torch.tensor([0.0, 0.2, 0.4]))
    expected = {"reward_mean": 0.2, "format_reward_mean": 1.0, "answer_reward_mean": 1.0 / 3, "reward_errors": 0}
    expected |= {"reward_min": 0.0, "reward_max": 0.4, "reward_std": statistics.pstdev([0, 0.2, 0.4])}
    assert metadata == pytest.approx(expected)


def test_a_failing_reward_costs_its_sample(caplog: pytest.LogCaptureFixture) -> None:
    rewards, metadata = compute_rollout_rewards(reward_of_length, ["raise", "ab", "nan"], [1, 1, 1])
    torch.testing.assert_close(rewards, torch.tensor([0.0, 0.2, 0.0]))
    assert metadata["reward_errors"] == 2
    assert caplog.messages == ["The reward function failed for 2 of 3 responses: RecursionError('too deep')"]


def test_mistakes_are_not_hidden() -> None:
    with pytest.raises(UserError, match="failed for all 2 responses: RecursionError"):
        compute_rollout_rewards(reward_of_length, ["raise", "raise"], [1, 1])
    with pytest.raises(UserError, match="failed for all 1 responses: KeyError"):
        compute_rollout_rewards(lambda response, truth: {"reward": 1.0}, ["a"], [1])
    with pytest.raises(UserError, match="2 responses and 1 ground truths"):
        compute_rollout_rewards(reward_of_length, ["a", "b"], [1])
    with pytest.raises(UserError, match="0 responses"):
        compute_rollout_rewards(reward_of_length, [], [])

    def missing_library(response: str, truth: Any) -> dict[str, float]:
        if response:
            raise UserError("install it")
        return {"reward": 1.0, "format_reward": 1.0, "answer_reward": 1.0}

    with pytest.raises(UserError, match="install it"):
        compute_rollout_rewards(missing_library, ["", "a"], [1, 1])


def reference_advantages(rewards: list[float], size: int, baseline: str, eps: float, normalizer: str) -> list[float]:
    advantages = []
    for start in range(0, len(rewards), size):
        group = rewards[start : start + size]
        mean = sum(group) / size
        std = statistics.stdev(group) if size > 1 else 0.0
        divisor = {"std": std + eps, "mean": mean + eps, "none": 1.0}[normalizer]
        advantages += [(reward - (mean if baseline == "mean" else 0.0)) / divisor for reward in group]
    return advantages


@FEW_EXAMPLES
@given(
    st.integers(1, 4).flatmap(
        lambda size: st.tuples(
            st.just(size),
            st.lists(st.lists(st.integers(0, 8).map(lambda n: n / 8), min_size=size, max_size=size), min_size=1),
        )
    ),
    st.sampled_from(["mean", "none"]),
    st.sampled_from(["std", "mean", "none"]),
)
def test_advantages_equal_the_reference(groups: tuple[int, list[list[float]]], baseline: Any, normalizer: Any) -> None:
    size, rows = groups
    rewards = [reward for row in rows for reward in row]
    advantages, metadata = compute_group_normalized_rewards(torch.tensor(rewards), size, baseline, 1e-3, normalizer)
    expected = torch.tensor(reference_advantages(rewards, size, baseline, 1e-3, normalizer))
    torch.testing.assert_close(advantages, expected, atol=1e-5, rtol=1e-5)
    silent = [all(a == 0 for a in row.tolist()) for row in expected.split(size)]
    assert metadata["groups_without_signal"] == pytest.approx(sum(silent) / len(silent))
    assert metadata["advantage_max"] == pytest.approx(float(expected.max()), abs=1e-5)


@pytest.mark.parametrize(
    ("baseline", "normalizer", "expected"),
    [
        ("mean", "std", [0.7071, -0.7071, -0.7071, 0.7071]),  # GRPO
        ("mean", "none", [0.5, -0.5, -0.5, 0.5]),  # Dr. GRPO
        ("none", "none", [1.0, 0.0, 0.0, 1.0]),  # REINFORCE, or the best of the samples
        ("mean", "mean", [1.0, -1.0, -1.0, 1.0]),  # MaxRL
    ],
)
def test_hand_worked_variants(baseline: Any, normalizer: Any, expected: list[float]) -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
    advantages, _ = compute_group_normalized_rewards(rewards, 2, baseline, 1e-6, normalizer)
    torch.testing.assert_close(advantages, torch.tensor(expected), atol=1e-4, rtol=0)


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 1e-9, 1e9])
@pytest.mark.parametrize("normalizer", ["std", "mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_group_of_equal_rewards_has_no_signal_whatever_the_rounding(
    value: float, normalizer: Any, dtype: torch.dtype
) -> None:
    rewards = torch.tensor([value] * 3 + [0.0, 1.0, 0.0], dtype=dtype)
    advantages, metadata = compute_group_normalized_rewards(rewards, 3, "mean", 1e-6, normalizer)
    assert advantages[:3].tolist() == [0.0, 0.0, 0.0] and advantages[3:].all()
    assert metadata["groups_without_signal"] == 0.5


def test_dtypes() -> None:
    assert compute_group_normalized_rewards(torch.tensor([0, 1]), 2)[0].dtype == torch.float32
    assert compute_group_normalized_rewards(torch.tensor([0.0, 1.0]).double(), 2)[0].dtype == torch.float64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0, 0.0, 1.0], 2), "3 rewards are not a multiple of group_size 2"),
        (([], 2), "0 rewards"),
        (([1.0], 0), "group_size 0"),
        (([1.0], 1, "median"), "baseline is 'median'; it must be mean or none"),
        (([1.0], 1, "mean", 1e-6, "max"), "advantage_normalizer is 'max'"),
        (([-1.0, 0.0], 2, "mean", 1e-6, "mean"), "mean reward is below 0"),
    ],
)
def test_invalid_arguments_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        compute_group_normalized_rewards(torch.tensor(arguments[0]), *arguments[1:])
