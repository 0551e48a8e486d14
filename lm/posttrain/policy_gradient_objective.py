"""The objective of policy gradients: responses with more reward than others become more likely.

Sources: CS336 assignment 5 (section 7); Shao et al. 2024 (GRPO); TRL's GRPOTrainer for the options.
"""

import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lm.common.errors import UserError
from lm.data.shuffle import shuffled_indices
from lm.distributed.process_group import all_gather, all_reduce_mean, get_rank, get_world_size
from lm.eval.reward_worker import RewardWorker, Verdict
from lm.eval.tasks import Problem
from lm.inference.completion import Completion
from lm.model.transformer import TransformerLM
from lm.posttrain.advantages import compute_group_normalized_rewards
from lm.posttrain.config import ReinforceConfig
from lm.posttrain.log_probs import get_response_log_probs
from lm.posttrain.masked import masked_normalize
from lm.posttrain.policy_gradient import compute_policy_gradient_loss, estimate_kl
from lm.posttrain.rollout import GREEDY, Rollout, encode_prompts, generate_rollouts
from lm.posttrain.sft_objective import answer_prompts
from lm.tokenizer.tokenizer import Tokenizer
from lm.train.metrics_file import format_row, read_metrics

_ROLLOUTS = "rollouts.jsonl"


@dataclass
class ScoredResponse:
    """A response with its rewards: a row of ``rollouts.jsonl``."""

    step: int
    """First step that learns from the response. The first step is 1."""
    problem: int
    """Index of its problem."""
    prompt_ids: list[int]
    ids: list[int]
    log_probs: list[float]
    text: str
    rewards: dict[str, float]
    error: str | None = None
    """Why there is no reward."""


class ResponseBatch(NamedTuple):
    """Responses with their prompts, padded on the right; (B, T) tensors, with advantages (B,)."""

    input_ids: Tensor
    labels: Tensor
    mask: Tensor
    """bool: the labels of the response."""
    advantages: Tensor
    old_log_probs: Tensor
    reference_log_probs: Tensor
    """Empty without a KL penalty."""
    weight: Tensor
    """Share of the divisor of the loss."""


class PolicyGradient:
    """The objective (:class:`lm.train.objective.Objective`) of :class:`lm.posttrain.config.ReinforceConfig`.

    Every ``updates_per_rollout`` steps, the model answers ``responses_per_rollout / group_size`` problems. Responses,
    rewards and log-probabilities are stored in ``out``, so that a resumed training uses the same. The reference of the
    KL penalty is ``model`` as it is given here.
    """

    metric_names: Sequence[str] = ("valid_reward", "valid_tokens")
    is_higher_better = True
    is_prefetchable = False
    is_compilable = False
    tokens_per_step = 0

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
        self.config, self.model, self.tokenizer, self.reward = config, model, tokenizer, reward
        self.digests, self.out = digests, out
        self.device = next(model.parameters()).device
        self.train, self.valid = train, valid
        context_length = model.config.context_length
        self.prompts, self.valid_prompts = (
            encode_prompts(tokenizer, [problem.prompt for problem in problems], context_length)
            for problems in (train, valid)
        )
        if not train:
            raise UserError("There are no problems to train on; name a task in data.tasks.")
        self.rank, self.world_size = get_rank(), get_world_size()
        if config.responses_per_rollout % (config.group_size * self.world_size):
            raise UserError(
                f"The {config.responses_per_rollout} responses of a rollout cannot be divided among {self.world_size} "
                f"processes in groups of reinforce.group_size {config.group_size}; change reinforce.train.batch_size."
            )
        self.reference = deepcopy(model).requires_grad_(False) if config.kl_weight else None
        self._stored: dict[int, list[ScoredResponse]] = {}  # of an unfinished training, by step
        self._responses: list[ScoredResponse] = []  # of the present rollout, on this rank
        self._advantages = torch.zeros(0)
        self._reference_log_probs: list[Tensor] = []
        self._rollout_step = -1
        self._rollout_metrics: dict[str, float] = {}
        self._sums: dict[str, Tensor] = {}
        self._started = 0.0

    def restore(self, previous: Path) -> None:
        """Read the responses of an unfinished training."""
        rows = read_metrics(previous / _ROLLOUTS)
        try:
            responses = [ScoredResponse(**row) for row in rows]
        except TypeError:
            responses = []
        self._stored = {}
        for response in responses:
            self._stored.setdefault(response.step - 1, []).append(response)

    def micro_batches(self, step: int) -> list[ResponseBatch]:
        """Return this rank's micro-batches of a step. The first step of a rollout samples the responses."""
        config = self.config
        rollout, update = divmod(step, config.updates_per_rollout)
        if rollout * config.updates_per_rollout != self._rollout_step:
            self._rollout_step = rollout * config.updates_per_rollout
            self._roll_out(is_resumed=step > self._rollout_step)
        epoch, part = divmod(update, config.updates_per_epoch)
        order = np.random.default_rng((config.train.seed, rollout, epoch)).permutation(len(self._responses))
        size = config.train.batch_size // self.world_size
        indices = order[part * size : (part + 1) * size].tolist() if config.updates_per_rollout > 1 else range(size)
        self._sums, self._started = {}, time.perf_counter()
        return self._split(list(indices))

    def _roll_out(self, is_resumed: bool) -> None:
        """Sample responses, or take the stored ones, and compute their advantages."""
        config, started = self.config, time.perf_counter()
        count = config.responses_per_rollout // self.world_size
        stored = self._stored.get(self._rollout_step, [])
        if is_resumed and len(stored) == config.responses_per_rollout:
            self._responses = stored[self.rank * count : (self.rank + 1) * count]
        else:
            # A reward may depend on time; the stored one counts.
            verdicts = {(row.problem, row.text): Verdict(row.rewards, row.error) for row in stored}
            self._responses = self._sample(count, verdicts)
            rows = all_gather(self._responses)
            if self.rank == 0:
                with (self.out / _ROLLOUTS).open("a", encoding="utf-8") as file:
                    file.writelines(format_row(asdict(row)) for part in rows for row in part)
        rewards = torch.tensor([row.rewards["reward"] for row in self._responses])
        if config.reward_threshold is None:
            self._advantages, metadata = compute_group_normalized_rewards(
                rewards, config.group_size, config.baseline, config.advantage_eps, config.advantage_normalizer
            )
        else:
            self._advantages = (rewards >= config.reward_threshold).float()
            is_empty = self._advantages.view(-1, config.group_size).sum(-1) == 0
            metadata = {"groups_without_signal": is_empty.float().mean().item()}
        self._reference_log_probs = self._score(self.reference) if self.reference else []
        tokens = [len(row.ids) for row in self._responses]
        self._rollout_metrics = {
            "reward": rewards.mean().item(),
            "reward_std": rewards.std(correction=0).item(),
            "format_reward": _mean([row.rewards["format_reward"] for row in self._responses]),
            "answer_reward": _mean([row.rewards["answer_reward"] for row in self._responses]),
            "reward_errors": float(sum(row.error is not None for row in self._responses)),
            "groups_without_signal": metadata["groups_without_signal"],
            "response_tokens": _mean(tokens),
            "rollout_tokens_per_second": round(sum(tokens) / (time.perf_counter() - started)),
        }

    def _sample(self, count: int, verdicts: dict[tuple[int, str], Verdict]) -> list[ScoredResponse]:
        config = self.config
        groups = count // config.group_size
        rollout = self._rollout_step // config.updates_per_rollout
        first = (rollout * self.world_size + self.rank) * groups
        problems = shuffled_indices(len(self.train), first, groups, config.train.seed).repeat(config.group_size)
        seeds = np.random.default_rng((config.train.seed, rollout, self.rank)).integers(0, 1 << 62, count)
        rollouts = generate_rollouts(
            self.model,
            self.tokenizer,
            [self.prompts[problem] for problem in problems],
            seeds.tolist(),
            config.max_new_tokens,
        )
        return [
            self._judge(rollout, int(problem), verdicts) for rollout, problem in zip(rollouts, problems, strict=True)
        ]

    def _judge(self, rollout: Rollout, problem: int, verdicts: dict[tuple[int, str], Verdict]) -> ScoredResponse:
        verdict = verdicts.get((problem, rollout.text))
        verdict = verdict or self.reward.score(rollout.text, self.train[problem].ground_truth)
        fields = {**asdict(rollout), "rewards": verdict.rewards, "error": verdict.error}
        return ScoredResponse(step=self._rollout_step + 1, problem=problem, **fields)

    def _split(self, indices: list[int]) -> list[ResponseBatch]:
        """Return the responses as micro-batches.

        Responses without an advantage have no gradient, unless there is a KL penalty: the model does not run on them.
        """
        divisor = self._divisor(indices)
        if self.reference is None:
            indices = [index for index in indices if self._advantages[index] != 0] or indices[:1]
        size = -(-len(indices) // self.config.train.gradient_accumulation_steps)
        parts = [indices[start : start + size] for start in range(0, len(indices), size)]
        return [self._batch(part, divisor / len(parts)) for part in parts]

    def _divisor(self, indices: Sequence[int]) -> float:
        """Return what the sum of the losses of some responses is divided by."""
        if self.config.reward_threshold is not None:
            indices = [index for index in indices if self._advantages[index] != 0]
        if self.config.loss_normalization == "token":
            return float(max(1, sum(len(self._responses[index].ids) for index in indices)))
        is_constant = self.config.loss_normalization == "constant"
        return float(max(1, len(indices)) * (self.config.max_new_tokens if is_constant else 1))

    def _batch(self, indices: Sequence[int], weight: float) -> ResponseBatch:
        rows = [self._responses[index] for index in indices]
        length = max((len(row.prompt_ids) + len(row.ids) for row in rows), default=2)
        ids = torch.zeros(len(rows), length, dtype=torch.int64)
        mask = torch.zeros(len(rows), length, dtype=torch.bool)
        old_log_probs = torch.zeros(len(rows), length)
        reference = torch.zeros(len(rows), length if self.reference else 0)
        for number, (index, row) in enumerate(zip(indices, rows, strict=True)):
            start, end = len(row.prompt_ids), len(row.prompt_ids) + len(row.ids)
            ids[number, :end] = torch.tensor(row.prompt_ids + row.ids)
            mask[number, start:end] = True
            old_log_probs[number, start:end] = torch.tensor(row.log_probs)
            if self._reference_log_probs:
                reference[number, start:end] = self._reference_log_probs[index]
        tensors = (ids[:, :-1], ids[:, 1:], mask[:, 1:], self._advantages[list(indices)], old_log_probs[:, 1:])
        parts = (*tensors, reference[:, 1:], torch.tensor(weight))
        return ResponseBatch(*(part.to(self.device) for part in parts))

    @torch.no_grad()
    def _score(self, reference: TransformerLM) -> list[Tensor]:
        """Return the log-probabilities of each response under the reference model."""
        result: list[Tensor] = []
        size = max(1, len(self._responses) // self.config.train.gradient_accumulation_steps)
        for start in range(0, len(self._responses), size):
            batch = self._batch(range(start, min(start + size, len(self._responses))), 1.0)
            scores = get_response_log_probs(reference, batch.input_ids, batch.labels, return_token_entropy=False)
            result += [row[mask].cpu() for row, mask in zip(scores["log_probs"], batch.mask, strict=True)]
        return result

    def weight(self, micro_batch: ResponseBatch) -> Tensor:
        """Return the share of the divisor: of the number of responses or tokens, see ``loss_normalization``."""
        return micro_batch.weight

    def loss_sum(self, model: TransformerLM, micro_batch: ResponseBatch) -> Tensor:
        """Return the sum of the losses of the responses, before the division by the weight."""
        config, mask = self.config, micro_batch.mask
        scores = get_response_log_probs(model, micro_batch.input_ids, micro_batch.labels, return_token_entropy=True)
        per_token, metadata = compute_policy_gradient_loss(
            micro_batch.advantages,
            scores["log_probs"],
            config.importance_reweighting,
            micro_batch.old_log_probs,
            (config.clip_low, config.clip_high),
            mask,
        )
        sums = {"tokens": mask.sum(), "entropy": masked_normalize(scores["token_entropy"], mask)}
        if "is_clipped" in metadata:
            sums["clip_fraction"] = (metadata["is_clipped"] & mask).sum()
        if self.reference is not None:
            kl = estimate_kl(scores["log_probs"], micro_batch.reference_log_probs)
            per_token = per_token + config.kl_weight * kl
            sums["kl"] = masked_normalize(kl.detach(), mask)
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        loss = masked_normalize(per_token, mask, dim=-1)
        if config.loss_normalization == "sequence":
            loss = loss / mask.sum(-1).clamp(min=1)
        return loss.sum()

    def step_metrics(self) -> dict[str, float]:
        """Return the rollout's rewards, lengths and speed, and entropy, KL and clip fraction of the update."""
        tokens = float(self._sums["tokens"])
        means = {name: float(value) / max(1.0, tokens) for name, value in self._sums.items() if name != "tokens"}
        speed = round(tokens / (time.perf_counter() - self._started))
        return {**self._rollout_metrics, **means, "update_tokens_per_second": speed}

    def evaluate(self, model: TransformerLM, is_final: bool) -> dict[str, float]:
        """Return mean reward and length of greedy responses to ``valid_problems`` held-out problems, at the end all."""
        count = len(self.valid)
        used = count if is_final else min(count, self.config.valid_problems)
        if not used:
            return {}
        indices = [place * count // used for place in range(used)][self.rank :: self.world_size]
        prompts = [self.valid_prompts[index] for index in indices]
        rollouts = generate_rollouts(
            model, self.tokenizer, prompts, [0] * len(prompts), self.config.max_new_tokens, GREEDY
        )
        truths = [self.valid[index].ground_truth for index in indices]
        verdicts = [self.reward.score(row.text, truth) for row, truth in zip(rollouts, truths, strict=True)]
        sums = torch.tensor(
            [sum(v.rewards["reward"] for v in verdicts), sum(len(row.ids) for row in rollouts), len(rollouts)],
            dtype=torch.float64,
            device=self.device,
        )
        reward, tokens, number = all_reduce_mean(sums).tolist()
        return {"valid_reward": reward / number, "valid_tokens": tokens / number}

    def sample(self, model: TransformerLM) -> list[Completion]:
        """Answer the prompts of ``sample_prompts``."""
        return answer_prompts(model, self.tokenizer, self.config.train)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))
