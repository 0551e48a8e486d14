"""One update of a policy with GRPO and its variants (CS336 assignment 5, section 7.2)."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lm.common.errors import UserError
from lm.eval.rewards import RewardFunction
from lm.optim.clip import clip_grad_norm
from lm.posttrain.advantages import compute_group_normalized_rewards, compute_rollout_rewards
from lm.posttrain.log_probs import get_response_log_probs
from lm.posttrain.masked import masked_normalize
from lm.posttrain.policy_gradient import (
    ClipRange,
    ReweightingMethod,
    aggregate_loss_across_microbatch,
    compute_policy_gradient_loss,
)
from lm.posttrain.tokenization import AnyTokenizer, tokenize_prompt_and_output


def grpo_train_step(
    model: nn.Module,
    tokenizer: AnyTokenizer,
    optimizer: torch.optim.Optimizer,
    gradient_accumulation_steps: int,
    max_grad_norm: float | None,
    reward_fn: RewardFunction,
    repeated_prompts: Sequence[str],
    rollout_responses: Sequence[str],
    repeated_ground_truths: Sequence[Any],
    group_size: int,
    baseline: Literal["mean", "none"] = "mean",
    advantage_eps: float = 1e-6,
    advantage_normalizer: Literal["std", "none", "mean"] = "std",
    importance_reweighting_method: ReweightingMethod = "none",
    old_log_probs: Tensor | None = None,
    cliprange: ClipRange | None = None,
    loss_normalization: Literal["sequence", "constant"] = "sequence",
    normalization_constant: float | None = None,
) -> tuple[Tensor, dict[str, Tensor | float]]:
    """Update ``model`` once with the rollouts of whole groups. Return the loss, a detached scalar, and metadata.

    Lists of B items: each prompt and ground truth is repeated for the ``group_size`` responses to it. Responses with
    an advantage of 0 have no gradient, so the model does not run on them; they count in the averages of the loss. The
    others are split into at most ``gradient_accumulation_steps`` micro-batches of B / gradient_accumulation_steps rows;
    the loss does not depend on the split. ``old_log_probs`` (B, T) belong to the labels of
    :func:`tokenize_prompt_and_output` of the whole batch. ``normalization_constant`` is for the whole batch. Gradients
    are None afterwards. See :func:`compute_group_normalized_rewards`, :func:`compute_policy_gradient_loss` and
    :func:`aggregate_loss_across_microbatch` for the other options.

    Metadata: that of :func:`compute_rollout_rewards` and :func:`compute_group_normalized_rewards`; ``grad_norm`` before
    clipping; ``response_tokens``, the mean over all responses; ``token_entropy`` in nats and ``clip_fraction``, means
    over the response tokens that the model ran on.

    Raises UserError for invalid options and lists of different lengths.
    """
    batch = tokenize_prompt_and_output(repeated_prompts, rollout_responses, tokenizer)
    raw_rewards, reward_metadata = compute_rollout_rewards(reward_fn, rollout_responses, repeated_ground_truths)
    advantages, advantage_metadata = compute_group_normalized_rewards(
        raw_rewards, group_size, baseline, advantage_eps, advantage_normalizer
    )
    if gradient_accumulation_steps < 1:
        raise UserError(f"gradient_accumulation_steps is {gradient_accumulation_steps}; it must be at least 1.")
    if old_log_probs is not None and old_log_probs.shape != batch["labels"].shape:
        raise UserError(
            f"old_log_probs are {tuple(old_log_probs.shape)}, the labels {tuple(batch['labels'].shape)}; compute them "
            "with get_response_log_probs on the same batch."
        )
    device = next(model.parameters()).device
    row_count = len(advantages)
    loss = torch.zeros((), device=device)
    entropy_sum, clipped_sum, token_count = (torch.zeros((), device=device) for _ in range(3))
    optimizer.zero_grad(set_to_none=True)
    rows_with_signal = advantages.nonzero().flatten()
    for rows in rows_with_signal.split(-(-row_count // gradient_accumulation_steps)) if len(rows_with_signal) else ():
        input_ids, labels, mask = (batch[name][rows].to(device) for name in ("input_ids", "labels", "response_mask"))
        scores = get_response_log_probs(model, input_ids, labels, return_token_entropy=True)
        per_token_loss, metadata = compute_policy_gradient_loss(
            advantages[rows].to(device),
            scores["log_probs"],
            importance_reweighting_method,
            None if old_log_probs is None else old_log_probs[rows.to(old_log_probs.device)].to(device),
            cliprange,
            mask,
        )
        micro_loss = aggregate_loss_across_microbatch(per_token_loss, mask, loss_normalization, normalization_constant)
        if loss_normalization == "sequence":
            micro_loss = micro_loss * (len(rows) / row_count)
        micro_loss.backward()
        loss += micro_loss.detach()
        token_count += mask.sum()
        entropy_sum += masked_normalize(scores["token_entropy"], mask)
        if "is_clipped" in metadata:
            clipped_sum += (metadata["is_clipped"] & mask).sum()
    grad_norm = clip_grad_norm(model.parameters(), torch.inf if max_grad_norm is None else max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss, {
        **reward_metadata,
        **advantage_metadata,
        "grad_norm": grad_norm,
        "response_tokens": batch["response_mask"].sum().item() / row_count,
        "token_entropy": entropy_sum / token_count.clamp(min=1),
        "clip_fraction": clipped_sum / token_count.clamp(min=1),
    }
