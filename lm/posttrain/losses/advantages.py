"""Rewards of rollouts, and advantages: within groups of rollouts to one prompt (CS336 assignment 5, section 7.2), and
generalized advantage estimation (GAE) from values.

Sources: Shao et al. 2024 (GRPO); Liu et al. 2025 (Dr. GRPO, without the division by the standard deviation); Tajwar et
al. 2026 (MaxRL, division by the mean); Schulman et al. 2016 (GAE); Huang et al. 2022 (whitening). Dimensions: B
responses of a batch, T tokens of each, padded on the right.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lm.common.errors import UserError
from lm.eval.rewards import REWARD_KEYS, RewardFunction
from lm.posttrain.losses.log_probs import mask_out

log = logging.getLogger(__name__)


def compute_rollout_rewards(
    reward_fn: RewardFunction, rollout_responses: Sequence[str], repeated_ground_truths: Sequence[Any]
) -> tuple[Tensor, dict[str, float]]:
    """Return the reward of each response, (B,) float32, and metadata.

    ``reward_fn(response, ground_truth)`` returns ``reward``, ``format_reward`` and ``answer_reward``. If it raises
    anything but UserError, or a reward is not finite, the response gets 0 of each, with one warning for all.

    Metadata: ``reward_mean``, ``reward_std``, ``reward_min``, ``reward_max``, ``format_reward_mean``,
    ``answer_reward_mean``, and ``reward_errors``, the number of responses without a reward.

    Raises UserError if there are no responses, not as many ground truths, or if no response got a reward.
    """
    if not rollout_responses or len(rollout_responses) != len(repeated_ground_truths):
        raise UserError(
            f"There are {len(rollout_responses)} responses and {len(repeated_ground_truths)} ground truths; give one "
            "ground truth for each response."
        )
    rows: list[dict[str, float]] = []
    errors: list[Exception] = []
    for response, ground_truth in zip(rollout_responses, repeated_ground_truths, strict=True):
        try:
            rewards = reward_fn(response, ground_truth)
            row = {key: float(rewards[key]) for key in REWARD_KEYS}
            if not all(map(math.isfinite, row.values())):
                raise ValueError(f"not finite: {rewards}")
        except UserError:  # e.g. a library is missing
            raise
        except Exception as error:  # hostile responses raise anything; they must not end the run
            errors.append(error)
            row = dict.fromkeys(REWARD_KEYS, 0.0)
        rows.append(row)
    if len(errors) == len(rows):
        raise UserError(f"The reward function failed for all {len(rows)} responses: {errors[0]!r}.") from errors[0]
    if errors:
        log.warning("The reward function failed for %d of %d responses: %r", len(errors), len(rows), errors[0])
    raw_rewards = torch.tensor([row["reward"] for row in rows])
    summary = summarize_rewards(rows)
    metadata = {f"{name}_mean" if name in REWARD_KEYS else name: value for name, value in summary.items()}
    metadata |= {"reward_min": raw_rewards.min().item(), "reward_max": raw_rewards.max().item()}
    return raw_rewards, metadata | {"reward_errors": float(len(errors))}


def summarize_rewards(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each of :data:`REWARD_KEYS` over the responses, and ``reward_std``."""
    means = {key: float(np.mean([row[key] for row in rows])) for key in REWARD_KEYS}
    return {**means, "reward_std": float(np.std([row["reward"] for row in rows]))}


def compute_group_normalized_rewards(
    raw_rewards: Tensor,
    group_size: int,
    baseline: Literal["mean", "none"] = "mean",
    advantage_eps: float = 1e-6,
    advantage_normalizer: Literal["std", "none", "mean"] = "std",
) -> tuple[Tensor, dict[str, float]]:
    """Return the advantage of each response, with the shape (B,) and dtype of ``raw_rewards``, and metadata.

    Each ``group_size`` consecutive responses are a group. ``baseline="mean"`` subtracts the group's mean.
    ``advantage_normalizer`` then divides by the group's standard deviation (with Bessel's correction) or its mean, plus
    ``advantage_eps``. With the baseline, a group of equal rewards has advantages of exactly 0.

    Metadata: ``advantage_mean``, ``advantage_std``, ``advantage_min``, ``advantage_max``, and
    ``groups_without_signal``, the share of groups whose advantages are all 0.

    Raises UserError for an unknown option, a number of rewards that is not a multiple of ``group_size``, and a mean
    below 0 as the normalizer.
    """
    check_option("baseline", baseline, ("mean", "none"))
    check_option("advantage_normalizer", advantage_normalizer, ("std", "none", "mean"))
    if group_size < 1 or not len(raw_rewards) or len(raw_rewards) % group_size:
        raise UserError(f"{len(raw_rewards)} rewards are not a multiple of group_size {group_size}; give whole groups.")
    groups = raw_rewards.double().unflatten(0, (-1, group_size))
    means = groups.mean(-1, keepdim=True)
    advantages = groups
    if baseline == "mean":
        is_equal = groups.amax(-1, keepdim=True) == groups.amin(-1, keepdim=True)
        advantages = (groups - means).masked_fill(is_equal, 0.0)  # rounding leaves a difference
    if advantage_normalizer == "std":
        std = groups.std(-1, keepdim=True) if group_size > 1 else torch.zeros_like(means)
        advantages = advantages / (std + advantage_eps)
    elif advantage_normalizer == "mean":
        if (means < 0).any():
            raise UserError("A group's mean reward is below 0; advantage_normalizer mean needs rewards of at least 0.")
        advantages = advantages / (means + advantage_eps)
    metadata = {
        "advantage_mean": advantages.mean().item(),
        "advantage_std": advantages.std(correction=0).item(),
        "advantage_min": advantages.min().item(),
        "advantage_max": advantages.max().item(),
        "groups_without_signal": (advantages == 0).all(-1).double().mean().item(),
    }
    dtype = raw_rewards.dtype if raw_rewards.is_floating_point() else torch.float32
    return advantages.flatten().to(dtype), metadata


def compute_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Return generalized advantages and the returns that values should predict, (B, T) each, 0 where masked.

    ``rewards`` of the tokens and ``values`` of the states before them (B, T); ``mask`` (B, T), with padding on the
    right. With r the rewards, V the values and δ_t = r_t + gamma · V_{t+1} − V_t, the advantage is
    A_t = δ_t + gamma · lam · A_{t+1}, and the return A_t + V_t. A response ends at its last token: V is 0 there after.
    """
    rewards, values = mask_out(rewards, mask), mask_out(values, mask)
    advantages_BT = torch.zeros_like(values)
    next_value_B = next_advantage_B = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta_B = rewards[:, t] + gamma * next_value_B - values[:, t]
        next_value_B, next_advantage_B = values[:, t], delta_B + gamma * lam * next_advantage_B
        advantages_BT[:, t] = next_advantage_B
    advantages_BT = mask_out(advantages_BT, mask)
    return advantages_BT, advantages_BT + values


def whiten(tensor: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Return ``tensor`` with mean 0 and variance 1 over its unmasked elements, 0 where masked. Both have one shape.

    Elements that are all equal become 0.
    """
    used = mask.bool()
    count = used.sum().clamp(min=1)
    centered = mask_out(tensor - mask_out(tensor, mask).sum() / count, mask)
    return centered * (centered.square().sum() / count + eps).rsqrt()


def check_option(name: str, value: str, known: Sequence[str]) -> None:
    """Raise UserError if ``value`` is not one of ``known``."""
    if value not in known:
        raise UserError(f"{name} is {value!r}; it must be {' or '.join(known)}.")
