"""Advantages and losses of PPO against plain float64 loops and cases worked by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.posttrain.losses.advantages import compute_gae, whiten
from lm.posttrain.losses.ppo import compute_token_rewards, ppo_value_loss

NAN = math.nan
NUMBERS = st.floats(-10, 10)
RESPONSES = st.lists(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=6), min_size=1, max_size=4)


def padded(rows: list[list[float]], fill: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of numbers as a tensor padded on the right with ``fill``, and the mask of the numbers."""
    length = max(1, *map(len, rows)) + 1
    numbers = [[*row, *[fill] * (length - len(row))] for row in rows]
    mask = [[place < len(row) for place in range(length)] for row in rows]
    return torch.tensor(numbers, dtype=torch.float64), torch.tensor(mask)


def plain_advantage(rewards: list[float], values: list[float], t: int, gamma: float, lam: float) -> float:
    """The sum of discounted errors, as in equation 16 of Schulman et al. 2016."""
    ends = [*values, 0.0]
    errors = [reward + gamma * ends[k + 1] - ends[k] for k, reward in enumerate(rewards)]
    return sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, len(rewards)))


@given(responses=RESPONSES, gamma=st.floats(0.1, 1), lam=st.floats(0, 1))
def test_gae_equals_the_plain_sum(responses: list[list[tuple[float, float]]], gamma: float, lam: float) -> None:
    columns = [[[pair[side] for pair in response] for response in responses] for side in (0, 1)]
    rewards, mask = padded(columns[0], fill=NAN)
    values, _ = padded(columns[1], fill=NAN)
    advantages, returns = compute_gae(rewards, values, mask, gamma, lam)
    for number, (row_rewards, row_values) in enumerate(zip(*columns, strict=True)):
        expected = [plain_advantage(row_rewards, row_values, t, gamma, lam) for t in range(len(row_rewards))]
        assert advantages[number, : len(expected)].tolist() == pytest.approx(expected, abs=1e-9)
        sums = [advantage + value for advantage, value in zip(expected, row_values, strict=True)]
        assert returns[number, : len(expected)].tolist() == pytest.approx(sums, abs=1e-9)
    assert (advantages[~mask] == 0).all() and (returns[~mask] == 0).all()


@pytest.mark.parametrize(
    ("rewards", "values", "gamma", "lam", "advantages", "returns"),
    [
        ([3.0], [1.0], 1.0, 0.95, [2.0], [3.0]),
        ([0.0, 0.0, 1.0], [0.0, 0.0, 0.0], 1.0, 1.0, [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]),
        ([0.0, 0.0, 1.0], [0.5, 0.5, 0.5], 1.0, 0.0, [0.0, 0.0, 0.5], [0.5, 0.5, 1.0]),
        ([0.0, 1.0], [0.0, 0.0], 0.5, 1.0, [0.5, 1.0], [0.5, 1.0]),
        ([1.0, 2.0], [3.0, 4.0], 1.0, 0.5, [1 + 4 - 3 + 0.5 * -2.0, -2.0], [4.0, 2.0]),
    ],
    ids=["one-token", "rewards-to-go", "one-step", "discount", "both"],
)
def test_gae_by_hand(
    rewards: list[float],
    values: list[float],
    gamma: float,
    lam: float,
    advantages: list[float],
    returns: list[float],
) -> None:
    mask = torch.ones(1, len(rewards))
    result = compute_gae(torch.tensor([rewards]), torch.tensor([values]), mask, gamma, lam)
    assert [row.tolist()[0] for row in result] == [pytest.approx(advantages), pytest.approx(returns)]


def test_masked_rows_are_0() -> None:
    advantages, returns = compute_gae(torch.full((2, 3), NAN), torch.full((2, 3), NAN), torch.zeros(2, 3))
    assert not advantages.any() and not returns.any()


def test_the_reward_of_a_response_is_at_its_last_token() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    log_probs = torch.full((4, 4), -1.0)
    reference = torch.tensor([[-2.0, -3.0, -1.0, NAN]]).expand(4, 4)
    rewards = compute_token_rewards(torch.tensor([10.0, 20.0, 30.0, 40.0]), log_probs, reference.clone(), mask, 0.5)
    expected = [[0.0, -1.0, 10.0, 0.0], [19.5, 0.0, 0.0, 0.0], [0.0] * 4]
    assert rewards[:3].tolist() == expected
    assert rewards[3, :3].tolist() == [-0.5, -1.0, 0.0]


@given(rows=st.lists(st.lists(NUMBERS, max_size=5), min_size=1, max_size=4), shift=NUMBERS)
def test_whitened_numbers_have_mean_0_and_variance_1(rows: list[list[float]], shift: float) -> None:
    numbers, mask = padded(rows, fill=NAN)
    result = whiten(numbers, mask)
    used = result[mask]
    assert (result[~mask] == 0).all()
    if len(used) > 1 and numbers[mask].std() > 0.1:
        assert used.mean().item() == pytest.approx(0, abs=1e-6)
        assert used.square().mean().item() == pytest.approx(1, abs=1e-4)
    torch.testing.assert_close(whiten(numbers + shift, mask), result, atol=1e-6, rtol=1e-6)


def test_equal_numbers_become_0() -> None:
    assert whiten(torch.full((2, 3), 0.3), torch.ones(2, 3)).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient"),
    [
        (1.0, 1.0, 2.0, 0.5, -1.0),  # not moved yet
        (1.1, 1.0, 2.0, 0.405, -0.9),  # within the clip range
        (1.5, 1.0, 2.0, 0.32, 0.0),  # moved far toward the return: clipped
        (0.5, 1.0, 2.0, 1.125, -1.5),  # moved away from the return: not clipped
        (3.0, 1.0, 1.0, 2.0, 2.0),  # beyond the return
    ],
)
def test_value_loss_by_hand(value: float, old: float, target: float, loss: float, gradient: float) -> None:
    values = torch.tensor([value], requires_grad=True)
    result = ppo_value_loss(values, torch.tensor([old]), torch.tensor([target]), 0.2)
    result.sum().backward()
    assert result.item() == pytest.approx(loss, abs=1e-6)
    assert values.grad is not None and values.grad.item() == pytest.approx(gradient, abs=1e-6)
