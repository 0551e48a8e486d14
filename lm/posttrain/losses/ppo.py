"""Advantages and losses of proximal policy optimization (PPO) with a value head.

Sources: Schulman et al. 2016 (generalized advantage estimation); Schulman et al. 2017 (PPO); Ziegler et al. 2019 and
Ouyang et al. 2022 (the KL penalty in the reward of each token); Huang et al. 2022 (clipped values, whitening).
Dimensions: B responses of a batch, T tokens of each, padded on the right.
"""

import torch
from torch import Tensor

from lm.posttrain.losses.log_probs import mask_out


def compute_token_rewards(
    rewards: Tensor, log_probs: Tensor, reference_log_probs: Tensor, mask: Tensor, kl_weight: float
) -> Tensor:
    """Return the reward of each token (B, T): −kl_weight · (log p − log p_ref), and at a response's last token its own.

    ``rewards`` (B,) of the responses; the others (B, T), log-probabilities in nats. Masked tokens have 0.
    """
    token_rewards = mask_out(-kl_weight * (log_probs - reference_log_probs), mask)
    remaining = mask.bool().flip(-1).cumsum(-1).flip(-1)
    return torch.where(mask.bool() & (remaining == 1), token_rewards + rewards.unsqueeze(-1), token_rewards)


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


def ppo_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float) -> Tensor:
    """Return the loss of each value, half of the larger squared error: of the value, and of the clipped value.

    All (...,). The clipped value is at most ``value_clip`` from ``old_values``, those at the rollout: beyond, a value
    that moves toward its return has no gradient.
    """
    clipped = old_values + (values - old_values).clamp(-value_clip, value_clip)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())
