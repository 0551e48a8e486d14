"""The settings of post-training. Importing this module does not import torch, so that the command line starts fast."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

from lm.common.config import Config, bounded_field
from lm.common.errors import UserError
from lm.eval.rewards import combine_rewards
from lm.train.config import TrainConfig

Method = Literal["sft", "distill", "preference", "reward_model", "reinforce", "ppo"]


@dataclass(frozen=True)
class DialogsConfig(Config, section="dialogs"):
    """The data of post-training: dialogs, pairs of answers, and problems with a reward."""

    train: list[str] = field(default_factory=list)
    """Files of dialogs or pairs, JSON Lines, JSON arrays, CSV or Parquet: paths, globs or URLs. See
    docs/posttraining.md for the rows, and textmill dialogs --show FILE for those of a file."""
    valid: list[str] = field(default_factory=list)
    """Held-out dialogs or pairs, in the same forms. Empty (the default): use part of train, see valid_fraction."""
    valid_fraction: float = bounded_field(0.05, ge=0, lt=1)
    """Share of examples held out for validation: of the dialogs and pairs if valid is empty, and of the problems to
    train on. Examples with the same first question stay together; if more than 5 % of the rows share it, the next
    messages count too."""
    task: str = ""
    """Problems with a reward. addition:1-3, of numbers with one to three digits, and reasoning-gym:DATASET are
    generated. gsm8k, math, mmlu, words and answers are read from task_train and task_test. Empty: no problems."""
    task_train: list[str] = field(default_factory=list)
    """Files of problems to train on."""
    task_test: list[str] = field(default_factory=list)
    """Files of problems to evaluate on."""
    train_problems: int = bounded_field(2000, ge=1)
    """Number of problems to generate for training. Of files, at most this many are used if it is below their number."""
    test_problems: int = bounded_field(200, ge=1)
    """Number of problems to generate, or to use, for the evaluation."""
    solutions: int | None = bounded_field(None, ge=0)
    """Number of problems to train on whose solutions are dialogs for sft too. Default: all."""
    seed: int = bounded_field(0, ge=0, lt=1 << 63)
    """Seed of generated problems."""
    max_unused_fraction: float = bounded_field(0.5, ge=0, le=1)
    """Largest fraction of the rows of a field that may be damaged, or left out because a held-out example asks the
    same. More is an error, and 5 % or more a warning. It has no effect on the result."""

    @property
    def identity(self) -> dict[str, Any]:
        """Fields that enter the cache key. Files enter it by their content."""
        others = ("train", "valid", "task_train", "task_test", "max_unused_fraction")
        return {name: value for name, value in asdict(self).items() if name not in others}


@dataclass(frozen=True)
class DistillConfig(Config, section="distill"):
    """Distillation on policy: at each token of its own responses, the model learns the probabilities of a teacher."""

    updates_per_epoch: ClassVar[int] = 1
    epochs_per_rollout: ClassVar[int] = 1  # each response is used once, while it is the model's own

    teacher: str = ""
    """The model to learn from: the name of a run below the root, or a directory of Hugging Face, peft or Meta. It must
    have the tokens of the model that learns."""
    train: TrainConfig = field(default_factory=lambda: TrainConfig(steps=100, max_lr=1e-4, min_lr=0, warmup_steps=5))
    """The training. batch_size: responses per step, each to another prompt."""
    beta: float = bounded_field(1.0, ge=0, le=1)
    """Divergence to minimize. 1: KL(model, teacher), reverse, for a model that writes little that the teacher would
    not. 0: KL(teacher, model), forward, for one that may write all that the teacher would. Between: generalized
    Jensen-Shannon divergence."""
    temperature: float = bounded_field(1.0, gt=0, lt=math.inf)
    """Divisor of the logits of both models in the divergence. Responses are sampled at temperature 1."""
    on_policy_fraction: float = bounded_field(1.0, ge=0, le=1)
    """Share of the responses that the model samples itself. The others are the answers of the dialogs, or the solutions
    of the problems; a problem without one is always answered by the model."""
    max_new_tokens: int = bounded_field(64, ge=1)
    """Maximum number of tokens of a response, with the token that ends it."""
    valid_problems: int = bounded_field(64, ge=0)
    """Held-out prompts that an evaluation during the training answers, always the same. At the end, all are
    answered."""

    @property
    def identity(self) -> dict[str, Any]:
        """Fields that enter the cache key. The teacher enters it by its content."""
        fields = {name: value for name, value in asdict(self).items() if name != "teacher"}
        return fields | {"train": self.train.identity}


@dataclass(frozen=True)
class DPOConfig(Config, section="preference"):
    """Direct preference optimization (DPO) on pairs of answers."""

    train: TrainConfig = field(default_factory=lambda: TrainConfig(steps=200, max_lr=1e-5, min_lr=0, warmup_steps=20))
    """The training. batch_size: pairs per step."""
    beta: float = bounded_field(0.1, gt=0, lt=math.inf)
    """How strongly the model is kept near the reference model. Larger is nearer."""
    label_smoothing: float = bounded_field(0.0, ge=0, lt=0.5)
    """Probability that the two answers of a pair are in the wrong order (conservative DPO)."""
    is_length_normalized: bool = False
    """Use the mean log-probability of an answer's tokens instead of the sum."""


@dataclass(frozen=True)
class RewardModelConfig(Config, section="reward_model"):
    """A reward model, learned from pairs of answers with the Bradley-Terry loss."""

    train: TrainConfig = field(default_factory=lambda: TrainConfig(steps=200, max_lr=1e-5, min_lr=0, warmup_steps=20))
    """The training. batch_size: pairs per step."""
    center_weight: float = bounded_field(0.01, ge=0, lt=math.inf)
    """Weight of the penalty that keeps the mean of a pair's rewards near 0. Without it the mean is arbitrary."""


@dataclass(frozen=True)
class GRPOConfig(Config, section="reinforce"):
    """Policy gradients on rewards of the model's own responses: REINFORCE, GRPO and its variants, expert iteration.

    GRPO is the default with importance_reweighting grpo. Dr. GRPO: advantage_normalizer none, loss_normalization
    constant. DAPO: loss_normalization token, clip_high above clip_low. GSPO: importance_reweighting gspo, clip_low
    and clip_high of some 1e-4. CISPO: importance_reweighting cispo, loss_normalization token.
    """

    train: TrainConfig = field(default_factory=lambda: TrainConfig(steps=100, max_lr=1e-5, min_lr=0, warmup_steps=5))
    """The training. steps: updates. batch_size: responses per update of all processes."""
    group_size: int = bounded_field(8, ge=1)
    """Responses to each prompt. The number of responses per rollout must be a multiple of it."""
    updates_per_epoch: int = bounded_field(1, ge=1)
    """Updates with the responses of one rollout, each with other responses."""
    epochs_per_rollout: int = bounded_field(1, ge=1)
    """How often each response is used. Above 1, or with several updates, importance_reweighting corrects for the age of
    the responses."""
    max_new_tokens: int = bounded_field(64, ge=1)
    """Maximum number of tokens of a response, with the token that ends it."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Weight of each reward by name, see docs/posttraining.md. Default: the reward of the task."""
    reward_seconds: float = bounded_field(10.0, gt=0, lt=math.inf)
    """Time limit for the reward of a response. A response that takes longer gets 0."""
    reward_threshold: float | None = bounded_field(None, gt=-math.inf, lt=math.inf)
    """Expert iteration: responses with at least this reward are learned like answers of a fine-tuning, others are left
    out. The advantage is then 1, whatever baseline and advantage_normalizer are. Default: policy gradients."""
    baseline: Literal["mean", "none"] = "mean"
    """Subtracted from each reward: the mean of its group, or nothing. The mean needs groups of several responses."""
    advantage_normalizer: Literal["std", "none", "mean"] = "std"
    """Divisor of that difference: the standard deviation of the group (with the baseline mean), nothing, or the mean of
    the group."""
    advantage_eps: float = bounded_field(1e-6, gt=0, lt=math.inf)
    """Added to that divisor."""
    importance_reweighting: Literal["none", "noclip", "grpo", "gspo", "cispo"] = "none"
    """How the ratio of new to old probabilities enters the loss. none: as if the responses were fresh."""
    clip_low: float = bounded_field(0.2, ge=0, lt=math.inf)
    """The ratio is clipped below 1 minus this."""
    clip_high: float = bounded_field(0.2, ge=0, lt=math.inf)
    """The ratio is clipped above 1 plus this."""
    loss_normalization: Literal["sequence", "token", "constant"] = "sequence"
    """sequence: mean over the tokens of each response, then over the responses. token: mean over the tokens of all
    responses. constant: sum over all tokens, divided by the number of responses times max_new_tokens."""
    kl_weight: float = bounded_field(0.0, ge=0, lt=math.inf)
    """Weight of the KL divergence from the model at the start, a penalty per token."""
    valid_problems: int = bounded_field(64, ge=0)
    """Held-out problems that an evaluation during the training answers, always the same. At the end, all are
    answered."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rewards:
            combine_rewards(self.rewards)  # a wrong name is an error now, not after the trainings before this one
        if self.train.batch_size * self.updates_per_epoch % self.group_size:
            raise UserError(
                f"reinforce.train.batch_size {self.train.batch_size} times reinforce.updates_per_epoch "
                f"{self.updates_per_epoch} must be a multiple of reinforce.group_size {self.group_size}."
            )
        if self.reward_threshold is not None:
            return
        if self.baseline == "mean" and self.group_size == 1:
            raise UserError(
                "reinforce.group_size is 1, so each reward is the mean of its group, and nothing is learned; raise "
                "it, or set reinforce.baseline to none."
            )
        if self.baseline == "none" and self.advantage_normalizer == "std":
            raise UserError(
                "reinforce.baseline none does not work with reinforce.advantage_normalizer std: a group of equal "
                "rewards has no standard deviation to divide by. Set reinforce.advantage_normalizer to none or mean."
            )


@dataclass(frozen=True)
class PPOConfig(Config, section="ppo"):
    """Proximal policy optimization (PPO) on the rewards of a reward model, with a value head on the policy."""

    train: TrainConfig = field(default_factory=lambda: TrainConfig(steps=100, max_lr=1e-5, min_lr=0, warmup_steps=5))
    """The training. steps: updates. batch_size: responses per update of all processes."""
    updates_per_epoch: int = bounded_field(1, ge=1)
    """Updates with the responses of one rollout, each with other responses."""
    epochs_per_rollout: int = bounded_field(4, ge=1)
    """How often each response is used."""
    max_new_tokens: int = bounded_field(64, ge=1)
    """Maximum number of tokens of a response, with the token that ends it."""
    kl_weight: float = bounded_field(0.05, ge=0, lt=math.inf)
    """Penalty in the reward of a token: this weight times the log-ratio of the policy to the model at the start."""
    gamma: float = bounded_field(1.0, gt=0, le=1)
    """Discount of the rewards of later tokens."""
    gae_lambda: float = bounded_field(0.95, ge=0, le=1)
    """Generalized advantage estimation: 0 trusts the values, with bias; 1 trusts the rewards, with variance."""
    clip_low: float = bounded_field(0.2, ge=0, lt=math.inf)
    """The ratio of new to old probabilities is clipped below 1 minus this."""
    clip_high: float = bounded_field(0.2, ge=0, lt=math.inf)
    """The ratio is clipped above 1 plus this."""
    value_clip: float = bounded_field(0.2, gt=0, lt=math.inf)
    """A value may move this far from that at the rollout before its loss has no gradient."""
    value_weight: float = bounded_field(0.1, ge=0, lt=math.inf)
    """Weight of the loss of the values."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Weight of each true reward by name. Nothing learns from them: they are logged beside the learned reward, to show
    its over-optimization. Default: the reward of the task."""
    reward_seconds: float = bounded_field(10.0, gt=0, lt=math.inf)
    """Time limit for the true reward of a response. A response that takes longer gets 0."""
    valid_problems: int = bounded_field(64, ge=0)
    """Held-out prompts that an evaluation during the training answers, always the same. At the end, all are
    answered."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rewards:
            combine_rewards(self.rewards)  # checks the names


@dataclass(frozen=True)
class ComparisonConfig(Config, section="evaluate"):
    """How the models before and after post-training are compared."""

    prompts: list[str] = field(default_factory=list)
    """Prompts that each model answers, in addition to the problems."""
    max_new_tokens: int = bounded_field(128, ge=1)
    """Maximum number of tokens of a response."""


def reward_weights(weights: dict[str, float], task_reward: str) -> dict[str, float]:
    """Return the weight of each reward by name: ``weights``, or else the reward of the task, if there is one."""
    return weights or ({task_reward: 1.0} if task_reward else {})
