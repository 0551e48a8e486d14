"""Rollouts, responses of the model itself: the part of an objective that does not depend on its loss, and their record.

Dimensions: B responses of a batch with their prompts, T tokens of each, padded on the right.
"""

import logging
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lm.common.errors import DivergedError, UserError
from lm.data.batches import shuffled_indices
from lm.data.dialogs import Dialog, PreferencePair
from lm.distributed.process_group import all_gather, all_reduce_mean, call_on_rank0, get_rank, get_world_size
from lm.eval.problems import Problem
from lm.eval.reward_worker import RewardWorker, Verdict
from lm.inference.completion import Completion
from lm.model.transformer import TransformerLM
from lm.posttrain.config import DistillConfig, GRPOConfig, PPOConfig
from lm.posttrain.job import ObjectiveInputs
from lm.posttrain.losses.advantages import summarize_rewards
from lm.posttrain.losses.log_probs import after_last, get_response_log_probs
from lm.posttrain.objectives.generation import Rollout, answer_prompts, encode_prompts, generate_rollouts
from lm.posttrain.tokenization import pad_responses
from lm.train.objective import Objective
from lm.train.tracking import append_rows, iterate_metrics

log = logging.getLogger(__name__)

_ROLLOUTS = "rollouts.jsonl"
PromptSource = Problem | Dialog | PreferencePair  # only a problem has a ground truth; answers of a pair are not used


@dataclass
class RolloutRow:
    """A response with its rewards: a row of ``rollouts.jsonl``. Lists have a number for each of ``ids``."""

    step: int
    """First step that learns from the response. The first step is 1."""
    problem: int
    """Index of its problem, or of the dialog or pair with its prompt."""
    prompt_ids: list[int]
    ids: list[int]
    log_probs: list[float]
    """Log-probabilities when the response was sampled. If the loss compares them, they are the trainer's, not those of
    the decoder: under autocast the two differ. Empty for an answer of the data, which nothing sampled."""
    text: str
    rewards: dict[str, float] = field(default_factory=dict)
    """Rewards by name. Empty without a reward function."""
    error: str | None = None
    """Why there is no reward."""
    reference_log_probs: list[float] = field(default_factory=list)
    """Log-probabilities under the model at the start. Empty without a KL penalty."""
    values: list[float] = field(default_factory=list)
    """Values, at the rollout, of the states before each token. Empty without a value head."""
    learned_reward: float | None = None
    """Reward that a reward model gives."""

    @property
    def length(self) -> int:
        """Number of tokens of the prompt with the response."""
        return len(self.prompt_ids) + len(self.ids)

    def is_finite(self) -> bool:
        """Return whether all numbers that models gave the response are finite."""
        learned = [] if self.learned_reward is None else [self.learned_reward]
        return all(map(math.isfinite, [*self.log_probs, *self.reference_log_probs, *self.values, *learned]))


class RolloutObjective(Objective):
    """An objective that learns from responses of the model.

    The responses of a rollout are sampled by all ranks, and known to all. They and all that is computed from the
    weights of that moment are stored in ``out``, so that a training resumed in the middle of a rollout goes on with the
    same. Raises UserError if there are no prompts, if the batch cannot be divided among the ranks, or if the reward
    fails for all responses of a rollout.
    """

    metric_names: Sequence[str] = ("valid_reward", "valid_tokens")
    is_higher_better = True
    learns_from_rewards = True

    def __init__(
        self,
        settings: DistillConfig | GRPOConfig | PPOConfig,
        group_size: int,
        inputs: ObjectiveInputs[Any],
        reward: RewardWorker | None,
    ) -> None:
        self.settings, self.group_size, self.reward = settings, group_size, reward
        self.model, self.tokenizer = inputs.model, inputs.tokenizer
        self.digests, self.out, self.device = inputs.digests, inputs.out, inputs.device
        if not inputs.train:
            raise UserError("There are no problems to train on; name a task in dialogs.task.")
        encoded, encoded_valid = (
            encode_prompts(self.tokenizer, [source.prompt for source in sources], self.model.config.context_length)
            for sources in (inputs.train, inputs.valid)
        )
        if not encoded:
            raise UserError("No prompt leaves room for a response; use a model with a longer context.")
        self.prompts, self.valid_prompts = list(encoded.values()), list(encoded_valid.values())
        self.train: list[PromptSource] = [inputs.train[index] for index in encoded]
        self.valid: list[PromptSource] = [inputs.valid[index] for index in encoded_valid]
        self.responses_per_rollout = settings.train.batch_size * settings.updates_per_epoch
        self.updates_per_rollout = settings.updates_per_epoch * settings.epochs_per_rollout
        self.rank, self.world_size = get_rank(), get_world_size()
        if self.responses_per_rollout % (group_size * self.world_size):
            raise UserError(
                f"The {self.responses_per_rollout} responses of a rollout cannot be divided among "
                f"{self.world_size} processes in groups of {group_size}; change train.batch_size."
            )
        local_batch_size = settings.train.batch_size // self.world_size
        self.micro_batch_size = max(1, local_batch_size // settings.train.gradient_accumulation_steps)
        self._stored: dict[int, list[RolloutRow]] = {}  # of an unfinished training, by step; not of past rollouts
        self._responses: list[RolloutRow] = []  # of the present rollout, on all ranks
        self._padded_length = 2  # of the present rollout: its longest prompt with a response
        self._rollout_step = -1
        self._rollout_metrics: dict[str, float] = {}
        self._sums: dict[str, Tensor] = {}
        self._started = 0.0
        self._has_warned = False

    def annotate(self, responses: Sequence[RolloutRow]) -> None:  # a loss may need nothing else
        """Set the fields of sampled responses that follow from the present weights and other models."""

    def prepare(self) -> dict[str, float]:
        """Compute what to learn from the responses of the rollout; return metrics of it."""
        return {}

    def respond(self, indices: Sequence[int], seeds: Sequence[int]) -> list[Rollout]:
        """Return a response to the prompt of each index: the model samples it with the seed."""
        prompts = [self.prompts[index] for index in indices]
        return generate_rollouts(self.model, self.tokenizer, prompts, seeds, self.settings.max_new_tokens)

    @abstractmethod
    def split(self, indices: list[int]) -> Sequence[Any]:
        """Return the responses with these indices as micro-batches."""

    def padding(self, micro_batch: Any) -> Tensor:
        """Return which tokens are after the response, (B, T) bool."""
        return after_last(micro_batch.mask)

    def restore(self, previous: Path, step: int) -> None:
        """Read the responses of an unfinished training. Those of rollouts that ended before ``step`` are not kept."""
        present = step - step % self.updates_per_rollout

        def read() -> dict[int, list[RolloutRow]]:
            stored: dict[int, list[RolloutRow]] = {}
            try:
                for row in iterate_metrics(previous / _ROLLOUTS):
                    response = RolloutRow(**row)
                    if response.step > present:
                        stored.setdefault(response.step - 1, []).append(response)
            except TypeError:
                return {}
            return stored

        self._stored = call_on_rank0(read)

    def micro_batches(self, step: int) -> Sequence[Any]:
        """Return this rank's micro-batches of a step. The first step of a rollout samples the responses."""
        settings = self.settings
        rollout, update = divmod(step, self.updates_per_rollout)
        if rollout * self.updates_per_rollout != self._rollout_step:
            self._rollout_step = rollout * self.updates_per_rollout
            self._roll_out(is_resumed=step > self._rollout_step)
        epoch, part = divmod(update, settings.updates_per_epoch)
        order = np.arange(self.responses_per_rollout)
        if self.updates_per_rollout > 1:
            order = np.random.default_rng((settings.train.seed, rollout, epoch)).permutation(len(order))
        size = settings.train.batch_size // self.world_size
        first = part * settings.train.batch_size + self.rank * size
        self._sums, self._started = {}, time.perf_counter()
        return self.split(order[first : first + size].tolist())

    def _roll_out(self, is_resumed: bool) -> None:
        """Sample responses, or take the stored ones, and prepare to learn from them."""
        started = time.perf_counter()
        stored = self._stored.get(self._rollout_step, [])
        self._stored = {step: rows for step, rows in self._stored.items() if step > self._rollout_step}
        speed = {}
        if is_resumed and len(stored) == self.responses_per_rollout:
            self._responses = stored
            self._padded_length = max(row.length for row in stored)
        else:
            # A reward may depend on time; the stored one counts.
            verdicts = {(row.problem, row.text): Verdict(row.rewards) for row in stored if row.error is None}
            sampled = self._sample(verdicts)
            self._padded_length = max(all_gather(max(row.length for row in sampled)))
            self.annotate(sampled)
            self._responses = [row for part in all_gather(sampled) for row in part]
            tokens_per_second = sum(len(row.log_probs) for row in self._responses) / (time.perf_counter() - started)
            speed = {"rollout_tokens_per_second": float(round(tokens_per_second))}
            self._check_responses()
            if self.rank == 0:
                append_rows(self.out / _ROLLOUTS, map(asdict, self._responses))
        metrics = self.prepare()
        rewards, figures = dict[str, float](), dict[str, float]()
        if rows := [row for row in self._responses if row.log_probs]:
            if self.reward:
                rewards = summarize_rewards([row.rewards for row in rows])
                rewards["reward_errors"] = float(sum(row.error is not None for row in rows))
            figures["response_tokens"] = float(np.mean([len(row.ids) for row in rows]))
            # An estimate without bias. The update does not see the responses of groups without signal.
            figures["entropy"] = -float(np.mean([log_prob for row in rows for log_prob in row.log_probs]))
        self._rollout_metrics = {**rewards, **metrics, **figures, **speed}

    def _check_responses(self) -> None:
        """Warn of the first responses whose reward failed.

        Raises UserError if it failed for all of a rollout and the loss depends on it, and DivergedError if the
        model gave a response a number that is not finite.
        """
        errors = [row.error for row in self._responses if row.error is not None]
        if self.learns_from_rewards and len(errors) == len(self._responses):
            raise UserError(
                f"The reward function failed for all {len(errors)} responses of a rollout: {errors[0]}. Name a reward "
                "that fits the task, or raise reward_seconds if the time was too short."
            )
        if errors and not self._has_warned and self.rank == 0:
            self._has_warned = True
            log.warning(
                "The reward function failed for %d of %d responses of a rollout, which get 0: %s. The metric "
                "reward_errors has the number of each step.",
                len(errors),
                len(self._responses),
                errors[0],
            )
        if not all(row.is_finite() for row in self._responses):
            raise DivergedError(
                f"At step {self._rollout_step + 1:,} the model gives a response numbers that are not finite: the "
                "training has diverged. Lower train.max_lr."
            )

    def _sample(self, verdicts: dict[tuple[int, str], Verdict]) -> list[RolloutRow]:
        """Return this rank's share of the responses. Together they do not depend on the number of ranks."""
        settings = self.settings
        total = self.responses_per_rollout
        count = total // self.world_size
        rollout = self._rollout_step // self.updates_per_rollout
        first = (rollout * total + self.rank * count) // self.group_size
        problems = shuffled_indices(len(self.train), first, count // self.group_size, settings.train.seed)
        indices = problems.repeat(self.group_size).tolist()
        seeds = np.random.default_rng((settings.train.seed, rollout, 0)).integers(0, 1 << 62, total).tolist()
        rollouts = self.respond(indices, seeds[self.rank * count : (self.rank + 1) * count])
        rows = []
        for index, response in zip(indices, rollouts, strict=True):
            verdict = verdicts.get((index, response.text)) or self._judge(response, self.train[index])
            fields = {**asdict(response), "rewards": verdict.rewards, "error": verdict.error}
            rows.append(RolloutRow(step=self._rollout_step + 1, problem=index, **fields))
        return rows

    def _judge(self, rollout: Rollout, source: PromptSource) -> Verdict:
        ground_truth = source.ground_truth if isinstance(source, Problem) else None
        return self.reward.score(rollout.text, ground_truth) if self.reward else Verdict({})

    def make_batch(self, rows: Sequence[RolloutRow], *columns: Sequence[Sequence[float]]) -> list[Tensor]:
        """Return input ids and labels of prompts with responses, (B, T) int64 each, and a mask of the responses.

        Then ``columns``, numbers of the tokens of each response, as tensors (B, T). T is one length in a rollout:
        matmuls in bfloat16 round otherwise in another shape, and ratios compare their results.
        """
        ids_BT, mask_BT = pad_responses([(row.prompt_ids, row.ids) for row in rows], length=self._padded_length)
        numbers = (self.pad_numbers(mask_BT, column)[:, 1:] for column in columns)
        return [part.to(self.device) for part in (ids_BT[:, :-1], ids_BT[:, 1:], mask_BT[:, 1:], *numbers)]

    @staticmethod
    def pad_numbers(mask_BT: Tensor, numbers: Sequence[Sequence[float]]) -> Tensor:
        """Return numbers of the tokens of responses as a tensor (B, T), 0 where ``mask_BT`` is False."""
        result_BT = torch.zeros(mask_BT.shape)
        result_BT[mask_BT] = torch.tensor([number for row in numbers for number in row])
        return result_BT

    @torch.no_grad()
    def annotate_tokens(
        self, responses: Sequence[RolloutRow], name: str, function: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        """Set a field of each response to numbers of its tokens: ``function`` of input ids and labels, (B, T) each."""
        for start in range(0, len(responses), self.micro_batch_size):
            rows = responses[start : start + self.micro_batch_size]
            ids_BT, labels_BT, mask_BT = self.make_batch(rows)
            for row, numbers_T, mask_T in zip(rows, function(ids_BT, labels_BT), mask_BT, strict=True):
                setattr(row, name, numbers_T[mask_T].tolist())

    def annotate_log_probs(self, responses: Sequence[RolloutRow], name: str, model: nn.Module) -> None:
        """Set a field of each response to its tokens' log-probabilities under ``model``, as an update computes them."""
        self.annotate_tokens(
            responses, name, lambda ids, labels: get_response_log_probs(model, ids, labels, False)["log_probs"]
        )

    def add_to_step_metrics(self, **sums: Tensor) -> None:
        """Add sums over the tokens of a micro-batch; ``tokens`` is their number."""
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value.detach()

    def step_metrics(self) -> dict[str, float]:
        """Return the figures of the rollout, and means over the tokens of the update on this rank."""
        tokens = float(self._sums["tokens"])
        means = {name: float(value) / max(1.0, tokens) for name, value in self._sums.items() if name != "tokens"}
        speed = round(tokens / (time.perf_counter() - self._started))
        return {**self._rollout_metrics, **means, "update_tokens_per_second": speed}

    def evaluate(self, model: TransformerLM, is_final: bool) -> dict[str, float]:
        """Return means over greedy responses to ``valid_problems`` held-out prompts, at the end to all."""
        count = len(self.valid)
        used = count if is_final else min(count, self.settings.valid_problems)
        if not used:
            return {}
        indices = [number * count // used for number in range(used)][self.rank :: self.world_size]
        prompts = [self.valid_prompts[index] for index in indices]
        rollouts = generate_rollouts(model, self.tokenizer, prompts, None, self.settings.max_new_tokens)
        measured = self.measure(rollouts, [self.valid[index] for index in indices])
        sums = [*(sum(measured[name]) for name in self.metric_names), len(rollouts)]
        # On the CPU: MPS has no float64.
        *totals, number = all_reduce_mean(torch.tensor(sums, dtype=torch.float64)).tolist()
        return {name: total / number for name, total in zip(self.metric_names, totals, strict=True)}

    def measure(self, rollouts: Sequence[Rollout], sources: Sequence[PromptSource]) -> dict[str, list[float]]:
        """Return the metrics of greedy responses by name, with a number for each response."""
        measured = {"valid_tokens": [float(len(rollout.ids)) for rollout in rollouts]}
        if self.reward:
            verdicts = [self._judge(rollout, source) for rollout, source in zip(rollouts, sources, strict=True)]
            measured["valid_reward"] = [verdict.rewards["reward"] for verdict in verdicts]
        return measured

    def sample(self, model: TransformerLM) -> list[Completion]:
        """Answer the prompts of ``sample_prompts``."""
        return answer_prompts(model, self.tokenizer, self.settings.train)
