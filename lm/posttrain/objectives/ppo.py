"""The objective of PPO: responses to which a reward model gives more than the values predict become more likely.

Sources: see :mod:`lm.posttrain.losses.ppo`. Dimensions: B responses of a batch with their prompts, T tokens of each,
padded on the right.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from lm.checkpoint.training_checkpoint import load_model
from lm.data.chat_template import find_end_ids, written_end_id
from lm.data.dialogs import PreferencePair
from lm.eval.problems import Problem
from lm.eval.reward_worker import RewardWorker
from lm.model.adapter import make_reference
from lm.model.transformer import TransformerLM
from lm.posttrain.config import PPOConfig
from lm.posttrain.job import ObjectiveInputs, PosttrainJob
from lm.posttrain.losses.advantages import compute_gae, whiten
from lm.posttrain.losses.log_probs import masked_normalize, score_labels
from lm.posttrain.losses.policy_gradient import compute_policy_gradient_loss, estimate_kl
from lm.posttrain.losses.ppo import compute_token_rewards, ppo_value_loss
from lm.posttrain.losses.reward_model import score_dialogs
from lm.posttrain.objectives.generation import Rollout
from lm.posttrain.objectives.rollouts import PromptSource, RolloutObjective, RolloutRow


class PPOBatch(NamedTuple):
    """Responses with their prompts, padded on the right; (B, T) tensors."""

    input_ids: Tensor
    labels: Tensor
    mask: Tensor
    """bool: the labels of the response."""
    advantages: Tensor
    returns: Tensor
    old_values: Tensor
    old_log_probs: Tensor
    reference_log_probs: Tensor


class PPO(RolloutObjective):
    """The objective of :class:`lm.posttrain.config.PPOConfig`.

    ``model`` has a scalar head for the values: policy and values share one Transformer, and so one optimizer, one
    checkpoint and one forward pass. The reference of the KL penalty is ``model`` as it is given here.
    ``reward_model`` gives the rewards to learn from; those of ``reward`` are only logged. A response that was cut off
    is judged as if it ended there.
    """

    example_types = (Problem, PreferencePair)

    def __init__(
        self,
        config: PPOConfig,
        inputs: ObjectiveInputs[Any],
        reward_model: TransformerLM,
        reward: RewardWorker | None,
    ) -> None:
        super().__init__(config, 1, inputs, reward)
        self.config, self.reward_model = config, reward_model
        self.reference = make_reference(inputs.model)
        self.end_ids, self.end_id = find_end_ids(inputs.tokenizer), written_end_id(inputs.tokenizer)
        # The first selects the best checkpoint: the true reward must not.
        self.metric_names = ("valid_learned_reward", *(("valid_reward",) if reward else ()), "valid_tokens")
        self._advantages: list[list[float]] = []
        self._returns: list[list[float]] = []

    @classmethod
    def from_job(cls, job: PosttrainJob, inputs: ObjectiveInputs[Any]) -> Self:
        """Return the objective of a job. The model gets a value head. Starts a process if the job has rewards."""
        config = PPOConfig(train=job.config, **job.settings)
        reward_model = load_model(Path(job.reward_model), inputs.device, has_scalar_head=True).requires_grad_(False)
        worker = RewardWorker(job.rewards, config.reward_seconds) if job.rewards else None
        inputs.model.add_scalar_head()  # its values are 0 at first
        return cls(config, inputs, reward_model, worker and job.contexts.enter_context(worker))

    def annotate(self, responses: Sequence[RolloutRow]) -> None:
        """Set each response's learned reward, and the values and log-probabilities of its tokens."""
        learned_rewards = self._learned_rewards([(row.prompt_ids, row.ids) for row in responses])
        for row, reward in zip(responses, learned_rewards, strict=True):
            row.learned_reward = reward
        self.annotate_log_probs(responses, "log_probs", self.model)
        self.annotate_log_probs(responses, "reference_log_probs", self.reference)
        self.annotate_tokens(responses, "values", lambda ids, _: self.model.scalars(self.model.hidden_states(ids)))

    def _learned_rewards(self, responses: Sequence[tuple[list[int], list[int]]]) -> list[float]:
        # The reward is read at the end token, so there is always room for it.
        room = self.reward_model.config.context_length - 1
        dialogs = []
        for prompt_ids, ids in responses:
            dialog = prompt_ids + (ids[:-1] if self.end_ids.intersection(ids[-1:]) else ids)
            dialogs.append([*dialog[:room], self.end_id])
        return score_dialogs(self.reward_model, dialogs, self.micro_batch_size)

    def prepare(self) -> dict[str, float]:
        """Compute advantages and returns of all tokens of the rollout; return the mean learned reward."""
        rows, config = self._responses, self.config
        lengths = torch.tensor([len(row.ids) for row in rows])
        mask_BT = torch.arange(int(lengths.max())) < lengths.unsqueeze(-1)
        log_probs_BT, reference_BT, values_BT = (
            self.pad_numbers(mask_BT, numbers).double()
            for numbers in zip(*((row.log_probs, row.reference_log_probs, row.values) for row in rows), strict=True)
        )
        learned_B = torch.tensor([row.learned_reward or 0.0 for row in rows], dtype=torch.float64)
        rewards_BT = compute_token_rewards(learned_B, log_probs_BT, reference_BT, mask_BT, config.kl_weight)
        advantages_BT, returns_BT = compute_gae(rewards_BT, values_BT, mask_BT, config.gamma, config.gae_lambda)
        self._advantages, self._returns = (
            [row[used].tolist() for row, used in zip(numbers_BT, mask_BT, strict=True)]
            for numbers_BT in (whiten(advantages_BT, mask_BT), returns_BT)
        )
        return {
            "learned_reward": learned_B.mean().item(),
            "learned_reward_std": learned_B.std(correction=0).item(),
            "reward_with_kl": rewards_BT.sum(-1).mean().item(),
        }

    def split(self, indices: list[int]) -> list[PPOBatch]:
        """Return the responses with these indices as micro-batches."""
        batches = []
        for start in range(0, len(indices), self.micro_batch_size):
            part = indices[start : start + self.micro_batch_size]
            rows = [self._responses[index] for index in part]
            numbers = [
                (self._advantages[index], self._returns[index], row.values, row.log_probs, row.reference_log_probs)
                for index, row in zip(part, rows, strict=True)
            ]
            batches.append(PPOBatch(*self.make_batch(rows, *zip(*numbers, strict=True))))
        return batches

    def weight(self, micro_batch: PPOBatch) -> Tensor:
        """Return the number of tokens of responses."""
        return micro_batch.mask.sum()

    def loss_sum(self, model: TransformerLM, micro_batch: PPOBatch) -> Tensor:
        """Return the sum over the tokens of the losses of policy and values."""
        config, mask = self.config, micro_batch.mask
        hidden_states = model.hidden_states(micro_batch.input_ids)
        scores = score_labels(model.logits(hidden_states), micro_batch.labels, return_token_entropy=False)
        policy_loss, metadata = compute_policy_gradient_loss(
            micro_batch.advantages,
            scores["log_probs"],
            "grpo",
            micro_batch.old_log_probs,
            (config.clip_low, config.clip_high),
            mask,
        )
        values = model.scalars(hidden_states)
        value_loss = ppo_value_loss(values, micro_batch.old_values, micro_batch.returns, config.value_clip)
        sums = {
            "kl": estimate_kl(scores["log_probs"].detach(), micro_batch.reference_log_probs),
            "clip_fraction": metadata["is_clipped"].float(),
            "value_loss": value_loss,
            "value": values,
        }
        self.add_to_step_metrics(
            tokens=mask.sum(), **{name: masked_normalize(tensor, mask) for name, tensor in sums.items()}
        )
        return masked_normalize(policy_loss + config.value_weight * value_loss, mask)

    def measure(self, rollouts: Sequence[Rollout], sources: Sequence[PromptSource]) -> dict[str, list[float]]:
        """Return the metrics of greedy responses by name, with a number for each response."""
        learned = self._learned_rewards([(rollout.prompt_ids, rollout.ids) for rollout in rollouts])
        return {"valid_learned_reward": learned, **super().measure(rollouts, sources)}
