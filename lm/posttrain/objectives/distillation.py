"""Distillation on policy: at each token of its own responses, a model learns the next-token probabilities of a teacher.

Sources: Agarwal et al. 2023 (GKD); TRL's GKDTrainer for the options. Dimensions: B responses of a batch with their
prompts, T tokens of each, padded on the right, D width of a model.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from lm.common.errors import UserError
from lm.data.chat_template import encode_answer
from lm.data.dialogs import Dialog, Message
from lm.eval.problems import Problem
from lm.eval.reward_worker import RewardWorker, Verdict
from lm.model.transformer import TransformerLM
from lm.posttrain.config import DistillConfig
from lm.posttrain.job import ObjectiveInputs, PosttrainJob
from lm.posttrain.losses.distillation import sum_divergences
from lm.posttrain.objectives.generation import Rollout
from lm.posttrain.objectives.rollouts import PromptSource, RolloutObjective
from lm.posttrain.tokenization import pad_responses
from lm.train.frozen_base import load_beside

_REWARD_SECONDS = 10.0


class DistillationBatch(NamedTuple):
    """Responses with their prompts, padded on the right; (B, T) tensors."""

    input_ids: Tensor
    mask: Tensor
    """bool: the next token belongs to the response."""


class Distillation(RolloutObjective):
    """The objective of :class:`lm.posttrain.config.DistillConfig`.

    ``teacher`` is a model with the same token ids; ids that only one of the two has, as padding, are left out. A reward
    is only logged. Raises UserError if the teacher has fewer ids than the tokenizer, or if its context is too short for
    the prompts with their responses.
    """

    example_types = (Problem, Dialog)
    is_higher_better = False
    learns_from_rewards = False

    def __init__(
        self,
        config: DistillConfig,
        inputs: ObjectiveInputs[Any],
        teacher: TransformerLM,
        reward: RewardWorker | None,
    ) -> None:
        super().__init__(config, 1, inputs, reward)
        self.config, self.teacher = config, teacher
        self.metric_names = ("valid_divergence", *(("valid_reward",) if reward else ()), "valid_tokens")
        if (teacher.config.vocab_size or 0) < self.tokenizer.size:
            raise UserError(
                f"The teacher has {teacher.config.vocab_size:,} token ids, the tokenizer {self.tokenizer.size:,}. "
                "Distillation compares probabilities of tokens, so name a teacher with the tokenizer of the model in "
                "distill.teacher."
            )
        longest = max(map(len, (*self.prompts, *self.valid_prompts))) + config.max_new_tokens
        length = min(longest, self.model.config.context_length) - 1  # the last token is a label only
        if length > teacher.config.context_length:
            raise UserError(
                f"The teacher has a context of {teacher.config.context_length:,} tokens, but prompts with responses "
                f"take {length:,}. Lower distill.max_new_tokens, shorten the prompts, or name another teacher."
            )

    @classmethod
    def from_job(cls, job: PosttrainJob, inputs: ObjectiveInputs[Any]) -> Self:
        """Return the objective of a job. Starts a process if the job has rewards."""
        if not job.teacher:
            raise UserError("The job of distill names no teacher.")
        teacher = load_beside(Path(job.teacher), inputs.model, inputs.base)
        worker = RewardWorker(job.rewards, _REWARD_SECONDS) if job.rewards else None
        config = DistillConfig(train=job.config, **job.settings)
        return cls(config, inputs, teacher, worker and job.contexts.enter_context(worker))

    def respond(self, indices: Sequence[int], seeds: Sequence[int]) -> list[Rollout]:
        """Return a response to the prompt of each index, which its seed decides: of the model, or of the data."""
        fraction = self.config.on_policy_fraction
        rollouts = [
            self._given_response(index) if fraction < 1 and np.random.default_rng(seed).random() >= fraction else None
            for index, seed in zip(indices, seeds, strict=True)
        ]
        missing = [(index, seed) for index, seed, rollout in zip(indices, seeds, rollouts, strict=True) if not rollout]
        sampled = iter(super().respond(*zip(*missing, strict=True)) if missing else [])
        return [rollout or next(sampled) for rollout in rollouts]

    def _given_response(self, index: int) -> Rollout | None:
        """Return the data's answer to a prompt, cut to the length of a response; None for a prompt without one."""
        source, prompt = self.train[index], self.prompts[index]
        match source:
            case Dialog(messages=messages):
                answer = messages[-1]["content"]
            case Problem(prompt=question, solution=str(answer)):
                messages = (Message(role="user", content=question), Message(role="assistant", content=answer))
            case _:
                return None
        room = min(self.config.max_new_tokens, self.model.config.context_length - len(prompt))
        return Rollout(prompt, encode_answer(self.tokenizer, messages)[1][:room], [], answer)

    def _judge(self, rollout: Rollout, source: PromptSource) -> Verdict:
        return super()._judge(rollout, source) if rollout.log_probs else Verdict({})  # not of answers in the data

    def split(self, indices: list[int]) -> list[DistillationBatch]:
        """Return the responses with these indices as micro-batches."""
        batches = []
        for start in range(0, len(indices), self.micro_batch_size):
            part = indices[start : start + self.micro_batch_size]
            input_ids, _, mask = self.make_batch([self._responses[index] for index in part])
            batches.append(DistillationBatch(input_ids, mask))
        return batches

    def weight(self, micro_batch: DistillationBatch) -> Tensor:
        """Return the number of tokens of responses."""
        return micro_batch.mask.sum()

    def loss_sum(self, model: TransformerLM, micro_batch: DistillationBatch) -> Tensor:
        """Return the sum over the tokens of the divergences from the teacher."""
        ids, mask = micro_batch
        hidden_BTD, teacher_BTD = model.hidden_states(ids), self._teacher_states(ids)
        loss = self._sum_divergences(model, hidden_BTD[mask], teacher_BTD[mask])
        self.add_to_step_metrics(tokens=mask.sum(), divergence=loss)
        return loss

    @torch.no_grad()
    def _teacher_states(self, ids_BT: Tensor) -> Tensor:
        return self.teacher.hidden_states(ids_BT)

    def _sum_divergences(self, model: TransformerLM, hidden_ND: Tensor, teacher_ND: Tensor) -> Tensor:
        return sum_divergences(model, hidden_ND, self.teacher, teacher_ND, self.config.beta, self.config.temperature)

    def measure(self, rollouts: Sequence[Rollout], sources: Sequence[PromptSource]) -> dict[str, list[float]]:
        """Return the metrics of greedy responses by name, with a number for each response."""
        divergences: list[float] = []
        for start in range(0, len(rollouts), self.micro_batch_size):
            rows = rollouts[start : start + self.micro_batch_size]
            ids_BT, mask_BT = pad_responses([(row.prompt_ids, row.ids) for row in rows])
            ids, mask = ids_BT[:, :-1].to(self.device), mask_BT[:, 1:].to(self.device)
            states = zip(self.model.hidden_states(ids), self._teacher_states(ids), mask, strict=True)
            divergences += [
                float(self._sum_divergences(self.model, hidden_TD[mask_T], teacher_TD[mask_T])) / int(mask_T.sum())
                for hidden_TD, teacher_TD, mask_T in states
            ]
        return {"valid_divergence": divergences, **super().measure(rollouts, sources)}
