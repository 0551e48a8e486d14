"""The part of an objective on the model's own responses that does not depend on its loss: rollouts and their record."""

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lm.common.errors import UserError
from lm.data.batches import shuffled_indices
from lm.data.dialogs import PreferencePair
from lm.distributed.process_group import all_gather, all_reduce_mean, call_on_rank0, get_rank, get_world_size
from lm.eval.problems import Problem
from lm.eval.reward_worker import RewardWorker, Verdict
from lm.eval.rewards import REWARD_KEYS
from lm.inference.completion import Completion
from lm.model.transformer import TransformerLM
from lm.posttrain.config import PPOConfig, ReinforceConfig
from lm.posttrain.log_probs import get_response_log_probs
from lm.posttrain.masked import after_last
from lm.posttrain.rollout import GREEDY, Rollout, encode_prompts, generate_rollouts
from lm.posttrain.sft_objective import answer_prompts
from lm.tokenizer.tokenizer import Tokenizer
from lm.train.tracking import append_rows, iterate_metrics

log = logging.getLogger(__name__)

_ROLLOUTS = "rollouts.jsonl"
RolloutConfig = ReinforceConfig | PPOConfig
PromptSource = Problem | PreferencePair  # only a problem has a ground truth; the answers of a pair are not used


@dataclass
class RolloutRow:
    """A response with its rewards: a row of ``rollouts.jsonl``. Lists have a number for each of ``ids``."""

    step: int
    """First step that learns from the response. The first step is 1."""
    problem: int
    """Index of its problem, or of the pair with its prompt."""
    prompt_ids: list[int]
    ids: list[int]
    log_probs: list[float]
    """Log-probabilities when the response was sampled. If the loss compares them, they are the trainer's, not those of
    the decoder: under autocast the two differ."""
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


class RolloutObjective(ABC):
    """An objective (:class:`lm.train.objective.Objective`) that learns from responses of the model.

    The responses of a rollout are sampled by all ranks, and known to all. They and all that is computed from the
    weights of that moment are stored in ``out``, so that a training resumed in the middle of a rollout goes on with the
    same. Raises UserError if there are no prompts, if the batch cannot be divided among the ranks, or if the reward
    fails for all responses of a rollout.
    """

    metric_names: Sequence[str] = ("valid_reward", "valid_tokens")
    is_higher_better = True
    is_prefetchable = False
    is_compilable = False
    tokens_per_step = 0

    def __init__(
        self,
        settings: RolloutConfig,
        group_size: int,
        model: TransformerLM,
        tokenizer: Tokenizer,
        train: Sequence[PromptSource],
        valid: Sequence[PromptSource],
        reward: RewardWorker | None,
        digests: dict[str, str],
        out: Path,
    ) -> None:
        self.settings, self.group_size, self.model, self.tokenizer = settings, group_size, model, tokenizer
        self.reward, self.digests, self.out = reward, digests, out
        self.device = next(model.parameters()).device
        if not train:
            raise UserError("There are no problems to train on; name a task in dialogs.task.")
        encoded, encoded_valid = (
            encode_prompts(tokenizer, [source.prompt for source in sources], model.config.context_length)
            for sources in (train, valid)
        )
        if not encoded:
            raise UserError("No prompt leaves room for a response; use a model with a longer context.")
        self.prompts, self.valid_prompts = list(encoded.values()), list(encoded_valid.values())
        self.train, self.valid = [train[index] for index in encoded], [valid[index] for index in encoded_valid]
        self.responses_per_rollout = settings.train.batch_size * settings.updates_per_epoch
        self.updates_per_rollout = settings.updates_per_epoch * settings.epochs_per_rollout
        self.rank, self.world_size = get_rank(), get_world_size()
        if self.responses_per_rollout % (group_size * self.world_size):
            raise UserError(
                f"The {self.responses_per_rollout} responses of a rollout cannot be divided among "
                f"{self.world_size} processes in groups of {group_size}; change train.batch_size."
            )
        self.micro_batch_size = max(
            1, settings.train.batch_size // self.world_size // settings.train.gradient_accumulation_steps
        )
        self._stored: dict[int, list[RolloutRow]] = {}  # of an unfinished training, by step; not of past rollouts
        self._responses: list[RolloutRow] = []  # of the present rollout, on all ranks
        self._padded_length = 2  # of the present rollout: its longest prompt with a response
        self._rollout_step = -1
        self._rollout_metrics: dict[str, float] = {}
        self._sums: dict[str, Tensor] = {}
        self._started = 0.0
        self._has_warned = False

    @abstractmethod
    def annotate(self, responses: Sequence[RolloutRow]) -> None:
        """Set the fields of sampled responses that follow from the present weights and other models."""

    @abstractmethod
    def prepare(self) -> dict[str, float]:
        """Compute what to learn from the responses of the rollout; return metrics of it."""

    @abstractmethod
    def split(self, indices: list[int]) -> Sequence[Any]:
        """Return the responses with these indices as micro-batches."""

    @abstractmethod
    def weight(self, micro_batch: Any) -> Tensor:
        """See :class:`lm.train.objective.Objective`."""

    def padding(self, micro_batch: Any) -> Tensor:
        """Return which tokens are after the response, (B, T) bool."""
        return after_last(micro_batch.mask)

    @abstractmethod
    def loss_sum(self, model: TransformerLM, micro_batch: Any) -> Tensor:
        """See :class:`lm.train.objective.Objective`."""

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
        if is_resumed and len(stored) == self.responses_per_rollout:
            self._responses = stored
            self._padded_length = _longest(stored)
            speed = {}
        else:
            # A reward may depend on time; the stored one counts.
            verdicts = {(row.problem, row.text): Verdict(row.rewards) for row in stored if row.error is None}
            sampled = self._sample(verdicts)
            self._padded_length = max(all_gather(_longest(sampled)))
            self.annotate(sampled)
            self._responses = [row for part in all_gather(sampled) for row in part]
            tokens_per_second = sum(len(row.ids) for row in self._responses) / (time.perf_counter() - started)
            speed = {"rollout_tokens_per_second": float(round(tokens_per_second))}
            self._check_errors()
            self._check_finite()
            if self.rank == 0:
                append_rows(self.out / _ROLLOUTS, map(asdict, self._responses))
        metrics = self.prepare()
        self._rollout_metrics = {
            **(self._reward_metrics() if self.reward else {}),
            **metrics,
            "response_tokens": _mean(len(row.ids) for row in self._responses),
            # An estimate without bias. The update does not see the responses of groups without signal.
            "entropy": -_mean(log_prob for row in self._responses for log_prob in row.log_probs),
            **speed,
        }

    def _check_finite(self) -> None:
        """Raise UserError if the model gave a response a number that is not finite."""
        for row in self._responses:
            learned = [] if row.learned_reward is None else [row.learned_reward]
            if not all(map(math.isfinite, [*row.log_probs, *row.reference_log_probs, *row.values, *learned])):
                raise UserError(
                    f"At step {self._rollout_step + 1:,} the model gives a response numbers that are not finite: the "
                    "training has diverged. Lower train.max_lr."
                )

    def _check_errors(self) -> None:
        """Warn of the first responses whose reward failed. Raise UserError if it failed for all of a rollout."""
        errors = [row.error for row in self._responses if row.error is not None]
        if len(errors) == len(self._responses):
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

    def _reward_metrics(self) -> dict[str, float]:
        rows = self._responses
        return {
            **{name: _mean(row.rewards[name] for row in rows) for name in REWARD_KEYS},
            "reward_std": float(np.std([row.rewards["reward"] for row in rows])),
            "reward_errors": float(sum(row.error is not None for row in rows)),
        }

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
        rollouts = generate_rollouts(
            self.model,
            self.tokenizer,
            [self.prompts[index] for index in indices],
            seeds[self.rank * count : (self.rank + 1) * count],
            settings.max_new_tokens,
        )
        return [
            self._judge(rollout, index, verdicts.get((index, rollout.text)))
            for rollout, index in zip(rollouts, indices, strict=True)
        ]

    def _judge(self, rollout: Rollout, index: int, verdict: Verdict | None) -> RolloutRow:
        verdict = verdict or self._verdict(rollout, self.train[index])
        fields = {**asdict(rollout), "rewards": verdict.rewards, "error": verdict.error}
        return RolloutRow(step=self._rollout_step + 1, problem=index, **fields)

    def _verdict(self, rollout: Rollout, source: PromptSource) -> Verdict:
        ground_truth = source.ground_truth if isinstance(source, Problem) else None
        return self.reward.score(rollout.text, ground_truth) if self.reward else Verdict({})

    def pad_ids(self, rows: Sequence[RolloutRow]) -> tuple[Tensor, Tensor]:
        """Return the ids of prompts with responses, (B, T) int64 padded on the right, and where the responses are.

        T is one length in a rollout: matrix products in bfloat16 round otherwise in another shape, and ratios compare
        their results.
        """
        ids = torch.zeros(len(rows), self._padded_length, dtype=torch.int64)
        mask = torch.zeros(len(rows), self._padded_length, dtype=torch.bool)
        for number, row in enumerate(rows):
            start, end = len(row.prompt_ids), len(row.prompt_ids) + len(row.ids)
            ids[number, :end] = torch.tensor(row.prompt_ids + row.ids)
            mask[number, start:end] = True
        return ids, mask

    @staticmethod
    def pad_numbers(mask: Tensor, numbers: Sequence[Sequence[float]]) -> Tensor:
        """Return numbers of the tokens of responses as a tensor of the shape of ``mask`` (B, T), 0 elsewhere."""
        result = torch.zeros(mask.shape)
        result[mask] = torch.tensor([number for row in numbers for number in row])
        return result

    @torch.no_grad()
    def for_tokens(
        self, responses: Sequence[RolloutRow], function: Callable[[Tensor, Tensor], Tensor]
    ) -> list[list[float]]:
        """Return a number for each token of each response. ``function`` maps input ids and labels (B, T) to (B, T)."""
        result: list[list[float]] = []
        for start in range(0, len(responses), self.micro_batch_size):
            rows = responses[start : start + self.micro_batch_size]
            ids, mask = (part.to(self.device) for part in self.pad_ids(rows))
            numbers = function(ids[:, :-1], ids[:, 1:])
            result += [row[used].tolist() for row, used in zip(numbers, mask[:, 1:], strict=True)]
        return result

    def response_log_probs(self, model: TransformerLM, responses: Sequence[RolloutRow]) -> list[list[float]]:
        """Return the log-probabilities of the tokens of each response under ``model``, as an update computes them."""
        return self.for_tokens(
            responses, lambda ids, labels: get_response_log_probs(model, ids, labels, False)["log_probs"]
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
        indices = [place * count // used for place in range(used)][self.rank :: self.world_size]
        prompts = [self.valid_prompts[index] for index in indices]
        rollouts = generate_rollouts(
            model, self.tokenizer, prompts, [0] * len(prompts), self.settings.max_new_tokens, GREEDY
        )
        measured = self.measure(rollouts, [self.valid[index] for index in indices])
        sums = [*(sum(measured[name]) for name in self.metric_names), len(rollouts)]
        # On the CPU: MPS has no float64.
        *totals, number = all_reduce_mean(torch.tensor(sums, dtype=torch.float64)).tolist()
        return {name: total / number for name, total in zip(self.metric_names, totals, strict=True)}

    def measure(self, rollouts: Sequence[Rollout], sources: Sequence[PromptSource]) -> dict[str, list[float]]:
        """Return the metrics of greedy responses by name, with a number for each response."""
        measured = {"valid_tokens": [float(len(rollout.ids)) for rollout in rollouts]}
        if self.reward:
            verdicts = [self._verdict(rollout, source) for rollout, source in zip(rollouts, sources, strict=True)]
            measured["valid_reward"] = [verdict.rewards["reward"] for verdict in verdicts]
        return measured

    def sample(self, model: TransformerLM) -> list[Completion]:
        """Answer the prompts of ``sample_prompts``."""
        return answer_prompts(model, self.tokenizer, self.settings.train)


def _longest(rows: Sequence[RolloutRow]) -> int:
    """Return the largest number of tokens of a prompt with its response."""
    return max(len(row.prompt_ids) + len(row.ids) for row in rows)


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
