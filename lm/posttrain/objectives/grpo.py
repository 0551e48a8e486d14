"""GRPO and its variants: responses with more reward than others become more likely.

:class:`GRPO` is the objective of a training, :func:`grpo_train_step` one update of any model with given responses; the
two share their loss. Sources: CS336 assignment 5 (section 7); Shao et al. 2024 (GRPO); TRL's GRPOTrainer for the
options. Dimensions: B responses of a batch with their prompts, T tokens of each, padded on the right.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from lm.common.errors import UserError
from lm.eval.problems import Problem
from lm.eval.reward_worker import RewardWorker
from lm.eval.rewards import RewardFunction
from lm.model.adapter import make_reference
from lm.model.transformer import TransformerLM
from lm.optim.clip import clip_grad_norm
from lm.posttrain.config import GRPOConfig
from lm.posttrain.job import ObjectiveInputs, PosttrainJob
from lm.posttrain.losses.advantages import compute_group_normalized_rewards, compute_rollout_rewards
from lm.posttrain.losses.log_probs import get_response_log_probs, masked_normalize
from lm.posttrain.losses.policy_gradient import (
    ClipRange,
    ReweightingMethod,
    compute_policy_gradient_loss,
    estimate_kl,
    loss_divisor,
    sum_token_losses,
)
from lm.posttrain.objectives.rollouts import RolloutObjective, RolloutRow
from lm.posttrain.tokenization import AnyTokenizer, tokenize_prompt_and_output


class ResponseBatch(NamedTuple):
    """Responses with their prompts, padded on the right; (B, T) tensors, with advantages (B,)."""

    input_ids: Tensor
    labels: Tensor
    mask: Tensor
    """bool: the labels of the response."""
    advantages: Tensor
    old_log_probs: Tensor | None = None
    reference_log_probs: Tensor | None = None
    """None without a KL penalty."""
    weight: Tensor | float = 1.0
    """Share of the divisor of the loss."""


def compute_loss_sum(
    model: nn.Module,
    batch: ResponseBatch,
    method: ReweightingMethod,
    cliprange: ClipRange | None,
    is_mean_of_row: bool,
    kl_weight: float = 0.0,
    with_entropy: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the sum of the losses of the responses, a scalar, and sums over their tokens, without a gradient.

    See :func:`lm.posttrain.losses.policy_gradient.compute_policy_gradient_loss` and
    :func:`lm.posttrain.losses.policy_gradient.sum_token_losses` for the options. The sums: ``tokens``, their number;
    ``clip_fraction`` for methods with a ratio; ``kl`` with ``reference_log_probs``; ``token_entropy`` in nats.
    """
    mask_BT = batch.mask
    scores = get_response_log_probs(model, batch.input_ids, batch.labels, with_entropy)
    loss_BT, metadata = compute_policy_gradient_loss(
        batch.advantages, scores["log_probs"], method, batch.old_log_probs, cliprange, mask_BT
    )
    sums = {"tokens": mask_BT.sum()}
    if "is_clipped" in metadata:
        sums["clip_fraction"] = (metadata["is_clipped"] & mask_BT).sum()
    if batch.reference_log_probs is not None:
        kl_BT = estimate_kl(scores["log_probs"], batch.reference_log_probs, mask_BT)
        loss_BT = loss_BT + kl_weight * kl_BT
        sums["kl"] = masked_normalize(kl_BT.detach(), mask_BT)
    if with_entropy:
        sums["token_entropy"] = masked_normalize(scores["token_entropy"], mask_BT)
    return sum_token_losses(loss_BT, mask_BT, is_mean_of_row), sums


class GRPO(RolloutObjective):
    """The objective of :class:`lm.posttrain.config.GRPOConfig`.

    The reference of the KL penalty is ``model`` as it is given here; with an adapter, the model with the adapter off.
    """

    example_types = (Problem,)

    def __init__(self, config: GRPOConfig, inputs: ObjectiveInputs[Problem], reward: RewardWorker) -> None:
        super().__init__(config, config.group_size, inputs, reward)
        self.config = config
        self.reference = make_reference(inputs.model) if config.kl_weight else None
        self._advantages = torch.zeros(0)

    @classmethod
    def from_job(cls, job: PosttrainJob, inputs: ObjectiveInputs[Problem]) -> Self:
        """Return the objective of a job. Starts a process for the rewards."""
        if not job.rewards:
            raise UserError("The job of reinforce names no rewards.")
        config = GRPOConfig(train=job.config, **job.settings)
        return cls(config, inputs, job.contexts.enter_context(RewardWorker(job.rewards, config.reward_seconds)))

    def annotate(self, responses: Sequence[RolloutRow]) -> None:
        """Set the log-probabilities that the loss compares: of the policy for ratios, of the reference for the KL."""
        if self.config.importance_reweighting != "none":
            self.annotate_log_probs(responses, "log_probs", self.model)
        if self.reference is not None:
            self.annotate_log_probs(responses, "reference_log_probs", self.reference)

    def prepare(self) -> dict[str, float]:
        """Compute the advantage of each response; return the share of groups without a signal."""
        config = self.config
        rewards = torch.tensor([row.rewards["reward"] for row in self._responses])
        if config.reward_threshold is None:
            self._advantages, metadata = compute_group_normalized_rewards(
                rewards, config.group_size, config.baseline, config.advantage_eps, config.advantage_normalizer
            )
            return {"groups_without_signal": metadata["groups_without_signal"]}
        self._advantages = (rewards >= config.reward_threshold).float()
        is_empty = self._advantages.view(-1, config.group_size).sum(-1) == 0
        return {"groups_without_signal": is_empty.float().mean().item()}

    def split(self, indices: list[int]) -> list[ResponseBatch]:
        """Return the responses as ``gradient_accumulation_steps`` micro-batches.

        Responses without an advantage have no gradient, unless there is a KL penalty: the model does not run on them.
        Expert iteration leaves them out, also from the KL penalty. If fewer responses than micro-batches remain, the
        others have a response without tokens to learn from, since all ranks need the same number.
        """
        config = self.config
        with_advantage = [index for index in indices if self._advantages[index] != 0]
        counted = indices if config.reward_threshold is None else with_advantage
        kept = with_advantage if self.reference is None else counted
        if config.loss_normalization == "token":
            divisor = float(sum(len(self._responses[index].ids) for index in counted))
        else:
            divisor = float(len(counted) * (config.max_new_tokens if config.loss_normalization == "constant" else 1))
        parts = np.array_split(np.array(kept, dtype=np.int64), config.train.gradient_accumulation_steps)
        return [self._batch(part.tolist(), divisor / len(parts), filler=indices[0]) for part in parts]

    def _batch(self, indices: list[int], weight: float, filler: int) -> ResponseBatch:
        used = indices or [filler]
        rows = [self._responses[index] for index in used]
        columns = [[row.log_probs for row in rows]]
        if self.reference is not None:
            columns.append([row.reference_log_probs for row in rows])
        input_ids, labels, mask, *log_probs = self.make_batch(rows, *columns)
        mask = mask if indices else torch.zeros_like(mask)
        batch = ResponseBatch(input_ids, labels, mask, self._advantages[used].to(self.device), *log_probs)
        return batch._replace(weight=torch.tensor(weight).to(self.device))

    def weight(self, micro_batch: ResponseBatch) -> Tensor:
        """Return the share of the divisor: of the number of responses or tokens, see ``loss_normalization``."""
        return torch.as_tensor(micro_batch.weight)

    def loss_sum(self, model: TransformerLM, micro_batch: ResponseBatch) -> Tensor:
        """Return the sum of the losses of the responses, before the division by the weight."""
        config = self.config
        loss, sums = compute_loss_sum(
            model,
            micro_batch,
            config.importance_reweighting,
            (config.clip_low, config.clip_high),
            config.loss_normalization == "sequence",
            config.kl_weight,
        )
        self.add_to_step_metrics(**sums)
        return loss


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
    :func:`lm.posttrain.tokenization.tokenize_prompt_and_output` of the whole batch. ``normalization_constant`` is for
    the whole batch. Gradients are None afterwards. See :func:`compute_group_normalized_rewards`,
    :func:`compute_policy_gradient_loss` and :func:`aggregate_loss_across_microbatch` for the other options.

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
    row_count = len(advantages)
    divisor = loss_divisor(row_count, loss_normalization, normalization_constant)
    if gradient_accumulation_steps < 1:
        raise UserError(f"gradient_accumulation_steps is {gradient_accumulation_steps}; it must be at least 1.")
    if old_log_probs is not None and old_log_probs.shape != batch["labels"].shape:
        raise UserError(
            f"old_log_probs are {tuple(old_log_probs.shape)}, the labels {tuple(batch['labels'].shape)}; compute them "
            "with get_response_log_probs on the same batch."
        )
    tensors = [batch["input_ids"], batch["labels"], batch["response_mask"], advantages]
    tensors += [] if old_log_probs is None else [old_log_probs]
    device = next(model.parameters()).device
    loss, zero = torch.zeros((), device=device), torch.zeros((), device=device)
    totals: defaultdict[str, Tensor] = defaultdict(lambda: zero)  # over the tokens that the model ran on
    optimizer.zero_grad(set_to_none=True)
    rows_with_signal = advantages.nonzero().flatten()
    for rows in rows_with_signal.split(-(-row_count // gradient_accumulation_steps)) if len(rows_with_signal) else ():
        parts = (tensor[rows.to(tensor.device)].to(device) for tensor in tensors)
        loss_sum, sums = compute_loss_sum(
            model,
            ResponseBatch(*parts),
            importance_reweighting_method,
            cliprange,
            loss_normalization == "sequence",
            with_entropy=True,
        )
        (loss_sum / divisor).backward()
        loss += loss_sum.detach() / divisor
        for name, value in sums.items():
            totals[name] = totals[name] + value
    grad_norm = clip_grad_norm(model.parameters(), torch.inf if max_grad_norm is None else max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    tokens = totals["tokens"].clamp(min=1)
    return loss, {
        **reward_metadata,
        **advantage_metadata,
        "grad_norm": grad_norm,
        "response_tokens": batch["response_mask"].sum().item() / row_count,
        "token_entropy": totals["token_entropy"] / tokens,
        "clip_fraction": totals["clip_fraction"] / tokens,
    }
