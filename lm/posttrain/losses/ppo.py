"""Token rewards and the value loss of proximal policy optimization (PPO) with a value head.

Sources: Schulman et al. 2017 (PPO); Ziegler et al. 2019 and Ouyang et al. 2022 (the KL penalty in the reward of each
token); Huang et al. 2022 (clipped values). Dimensions: B responses of a batch, T tokens of each, padded on the right.
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


def ppo_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float) -> Tensor:
    """Return the loss of each value, half of the larger squared error: of the value, and of the clipped value.

    All (...,). The clipped value is at most ``value_clip`` from ``old_values``, those at the rollout: beyond, a value
    that moves toward its return has no gradient.
    """
    clipped = old_values + (values - old_values).clamp(-value_clip, value_clip)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())
