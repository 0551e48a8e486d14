"""The objective of policy gradients: responses with more reward than others become more likely.

Sources: CS336 assignment 5 (section 7); Shao et al. 2024 (GRPO); TRL's GRPOTrainer for the options.
"""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lm.eval.problems import Problem
from lm.eval.reward_worker import RewardWorker
from lm.model.transformer import TransformerLM
from lm.posttrain.advantages import compute_group_normalized_rewards
from lm.posttrain.config import ReinforceConfig
from lm.posttrain.log_probs import get_response_log_probs
from lm.posttrain.masked import masked_normalize
from lm.posttrain.policy_gradient import compute_policy_gradient_loss, estimate_kl
from lm.posttrain.rollout_objective import RolloutObjective, RolloutRow
from lm.tokenizer.tokenizer import Tokenizer


class ResponseBatch(NamedTuple):
    """Responses with their prompts, padded on the right; (B, T) tensors, with advantages (B,)."""

    input_ids: Tensor
    labels: Tensor
    mask: Tensor
    """bool: the labels of the response."""
    advantages: Tensor
    old_log_probs: Tensor
    reference_log_probs: Tensor
    """0 without a KL penalty."""
    weight: Tensor
    """Share of the divisor of the loss."""


class PolicyGradient(RolloutObjective):
    """The objective of :class:`lm.posttrain.config.ReinforceConfig`.

    The reference of the KL penalty is ``model`` as it is given here.
    """

    def __init__(
        self,
        config: ReinforceConfig,
        model: TransformerLM,
        tokenizer: Tokenizer,
        train: Sequence[Problem],
        valid: Sequence[Problem],
        reward: RewardWorker,
        digests: dict[str, str],
        out: Path,
    ) -> None:
        super().__init__(config, config.group_size, model, tokenizer, train, valid, reward, digests, out)
        self.config = config
        self.reference = deepcopy(model).requires_grad_(False) if config.kl_weight else None
        self._advantages = torch.zeros(0)

    def annotate(self, responses: Sequence[RolloutRow]) -> None:
        """Set the log-probabilities that the loss compares: of the policy for ratios, of the reference for the KL."""
        if self.config.importance_reweighting != "none":
            for response, row in zip(responses, self.response_log_probs(self.model, responses), strict=True):
                response.log_probs = row
        if self.reference is not None:
            for response, row in zip(responses, self.response_log_probs(self.reference, responses), strict=True):
                response.reference_log_probs = row

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
        divisor, kept = self._divisor(indices), indices
        if self.reference is None or self.config.reward_threshold is not None:
            kept = [index for index in indices if self._advantages[index] != 0]
        parts = np.array_split(np.array(kept, dtype=np.int64), self.config.train.gradient_accumulation_steps)
        return [self._batch(part.tolist(), divisor / len(parts), filler=indices[0]) for part in parts]

    def _divisor(self, indices: Sequence[int]) -> float:
        """Return what the sum of the losses of some responses is divided by; 0 if all of them are left out."""
        if self.config.reward_threshold is not None:
            indices = [index for index in indices if self._advantages[index] != 0]
        if self.config.loss_normalization == "token":
            return float(sum(len(self._responses[index].ids) for index in indices))
        is_constant = self.config.loss_normalization == "constant"
        return float(len(indices) * (self.config.max_new_tokens if is_constant else 1))

    def _batch(self, indices: list[int], weight: float, filler: int) -> ResponseBatch:
        if not indices:
            empty = self._batch([filler], weight, filler)
            return empty._replace(mask=torch.zeros_like(empty.mask))
        rows = [self._responses[index] for index in indices]
        ids, mask = self.pad_ids(rows)
        old_log_probs = self.pad_numbers(mask, [row.log_probs for row in rows])
        reference = torch.zeros(mask.shape)
        if self.reference is not None:
            reference = self.pad_numbers(mask, [row.reference_log_probs for row in rows])
        tensors = (ids[:, :-1], ids[:, 1:], mask[:, 1:], self._advantages[indices], old_log_probs[:, 1:])
        parts = (*tensors, reference[:, 1:], torch.tensor(weight))
        return ResponseBatch(*(part.to(self.device) for part in parts))

    def weight(self, micro_batch: ResponseBatch) -> Tensor:
        """Return the share of the divisor: of the number of responses or tokens, see ``loss_normalization``."""
        return micro_batch.weight

    def loss_sum(self, model: TransformerLM, micro_batch: ResponseBatch) -> Tensor:
        """Return the sum of the losses of the responses, before the division by the weight."""
        config, mask = self.config, micro_batch.mask
        scores = get_response_log_probs(model, micro_batch.input_ids, micro_batch.labels, return_token_entropy=False)
        per_token, metadata = compute_policy_gradient_loss(
            micro_batch.advantages,
            scores["log_probs"],
            config.importance_reweighting,
            micro_batch.old_log_probs,
            (config.clip_low, config.clip_high),
            mask,
        )
        sums = {"tokens": mask.sum()}
        if "is_clipped" in metadata:
            sums["clip_fraction"] = (metadata["is_clipped"] & mask).sum()
        if self.reference is not None:
            kl = estimate_kl(scores["log_probs"], micro_batch.reference_log_probs, mask)
            per_token = per_token + config.kl_weight * kl
            sums["kl"] = masked_normalize(kl.detach(), mask)
        self.add_to_step_metrics(**sums)
        loss = masked_normalize(per_token, mask, dim=-1)
        if config.loss_normalization == "sequence":
            loss = loss / mask.sum(-1).clamp(min=1)
        return loss.sum()
