"""Policy-gradient losses per token, and their aggregation (CS336 assignment 5, sections 7.2 and 7.3).

Sources: Williams 1992 (REINFORCE); Shao et al. 2024 (GRPO); Liu et al. 2025 (Dr. GRPO); Yu et al. 2025 (DAPO, an upper
clip of its own); Zheng et al. 2025 (GSPO); MiniMax 2025 (CISPO); Schulman 2020 (estimators of the KL divergence).
Dimensions: B responses of a batch, T tokens of each.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from lm.common.errors import UserError
from lm.posttrain.losses.advantages import check_option
from lm.posttrain.losses.log_probs import mask_out, masked_mean, masked_normalize

ReweightingMethod = Literal["none", "noclip", "grpo", "gspo", "cispo"]
ClipRange = float | tuple[float, float]  # both sides alike, or (below 1, above 1)


def compute_policy_gradient_loss(
    raw_rewards_or_advantages: Tensor,
    policy_log_probs: Tensor,
    importance_reweighting_method: ReweightingMethod = "none",
    old_log_probs: Tensor | None = None,
    cliprange: ClipRange | None = None,
    response_mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the policy-gradient loss of each token (B, T), and metadata.

    ``raw_rewards_or_advantages`` (B,), (B, 1), or (B, T) if each token has its own; ``policy_log_probs`` and
    ``old_log_probs`` (B, T), in nats, under the policy and under the one that sampled the responses. With the advantage
    A, the ratio r of the two probabilities and the clip range [1 − low, 1 + high], the loss is

    - ``none``: −A log p, for responses that this policy sampled; ``old_log_probs`` do not count.
    - ``noclip``: −A r.
    - ``grpo``: −min(A r, A clip(r)), for each token.
    - ``gspo``: the same with the geometric mean of r over the response, one number for the whole row.
    - ``cispo``: −A min(r, 1 + high) log p, with a gradient through log p only. It has no lower clip.

    ``cliprange`` is one number for both sides, or a pair (low, high) as in DAPO. ``response_mask`` (B, T) is needed by
    ``gspo``; the ratio of a masked token is 1.

    Metadata without a gradient: ``importance_ratio`` (B, T); ``is_clipped`` bool (B, T), where clipping removes or
    bounds the gradient; ``clip_fraction``, the share of such tokens in the response. Empty for ``none``.

    Raises UserError for an unknown method or a missing or invalid argument.
    """
    method = importance_reweighting_method
    check_option("importance_reweighting_method", method, get_args(ReweightingMethod))
    advantages = raw_rewards_or_advantages
    if advantages.shape != policy_log_probs.shape:
        advantages = advantages.reshape(-1, 1)
    if method == "none":
        return -advantages * policy_log_probs, {}
    if old_log_probs is None:
        raise UserError(f"importance_reweighting_method {method} needs old_log_probs.")
    if response_mask is None and method == "gspo":
        raise UserError("importance_reweighting_method gspo needs the response_mask.")
    mask = torch.ones_like(policy_log_probs) if response_mask is None else response_mask
    log_ratios = mask_out(policy_log_probs - old_log_probs.detach(), mask)
    if method == "gspo":
        lengths = mask.bool().sum(-1, keepdim=True).clamp(min=1)
        log_ratios = (log_ratios.sum(-1, keepdim=True) / lengths).expand_as(policy_log_probs)
    ratios = log_ratios.exp()
    is_clipped = torch.zeros_like(mask, dtype=torch.bool)
    if method == "noclip":
        loss = -advantages * ratios
    else:
        low, high = _check_cliprange(method, cliprange)
        if method == "cispo":
            loss = -advantages * ratios.detach().clamp(max=1 + high) * policy_log_probs
            is_clipped = ratios > 1 + high
        else:
            unclipped, clipped = advantages * ratios, advantages * ratios.clamp(1 - low, 1 + high)
            loss = -torch.minimum(unclipped, clipped)
            is_clipped = clipped < unclipped
    metadata = {"importance_ratio": ratios.detach(), "is_clipped": is_clipped}
    return loss, metadata | {"clip_fraction": masked_mean(is_clipped.float(), mask)}


def aggregate_loss_across_microbatch(
    per_token_policy_gradient_loss: Tensor,
    mask: Tensor,
    loss_normalization: Literal["sequence", "constant"] = "sequence",
    normalization_constant: float | None = None,
) -> Tensor:
    """Return the loss of a micro-batch, a scalar, from the loss of each token (B, T) and the response mask (B, T).

    ``sequence``: the mean over the response tokens of each row, then over the rows (GRPO); a row without a response
    token adds 0. ``constant``: the sum over all response tokens divided by ``normalization_constant`` (Dr. GRPO with a
    fixed constant, DAPO with the number of response tokens of the whole batch).

    Raises UserError for an unknown option or a missing constant.
    """
    divisor = loss_divisor(len(mask), loss_normalization, normalization_constant)
    return sum_token_losses(per_token_policy_gradient_loss, mask, loss_normalization == "sequence") / divisor


def loss_divisor(
    rows: int, loss_normalization: Literal["sequence", "constant"], normalization_constant: float | None
) -> float:
    """Return what :func:`aggregate_loss_across_microbatch` divides the sum of the losses of ``rows`` responses by."""
    check_option("loss_normalization", loss_normalization, ("sequence", "constant"))
    if loss_normalization == "sequence":
        return rows
    if not normalization_constant:
        raise UserError("loss_normalization constant needs a normalization_constant other than 0.")
    return normalization_constant


def sum_token_losses(per_token_loss_BT: Tensor, mask_BT: Tensor, is_mean_of_row: bool) -> Tensor:
    """Return the sum over the rows, a scalar, of each row's sum of the losses of its response tokens, or their mean."""
    loss_B = masked_normalize(per_token_loss_BT, mask_BT, dim=-1)
    if is_mean_of_row:
        loss_B = loss_B / mask_BT.bool().sum(-1).clamp(min=1)
    return loss_B.sum()


def estimate_kl(policy_log_probs: Tensor, reference_log_probs: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return an estimate of KL(policy ‖ reference) at each token the policy sampled, in nats and at least 0.

    All (...,). It is Schulman's k3, ``exp(d) − d − 1`` with ``d`` = reference − policy: without bias, and with less
    variance than ``−d``. A masked token has 0.
    """
    difference = reference_log_probs - policy_log_probs
    if mask is not None:  # before exp: 0 times its infinite gradient would be nan
        difference = mask_out(difference, mask)
    return torch.expm1(difference) - difference


def _check_cliprange(method: str, cliprange: ClipRange | None) -> tuple[float, float]:
    pair = cliprange if isinstance(cliprange, (tuple, list)) else (cliprange, cliprange)  # YAML has lists
    bounds = [bound for bound in pair if bound is not None and bound >= 0]
    if len(pair) != 2 or len(bounds) != 2:
        raise UserError(
            f"importance_reweighting_method {method} needs a cliprange of at least 0, or a pair (low, high); "
            f"it is {cliprange!r}."
        )
    return bounds[0], bounds[1]
