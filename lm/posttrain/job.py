"""The job of a post-training method: fine-tuning, preferences or rewards, from a model that exists."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from lm.checkpoint.training_checkpoint import load_model
from lm.common.errors import UserError
from lm.distributed.process_group import get_rank
from lm.eval.reward_worker import RewardWorker
from lm.hardware.device import explain_out_of_memory
from lm.model.moe import MoE
from lm.model.transformer import TransformerLM
from lm.posttrain.config import PPOConfig, PreferenceConfig, ReinforceConfig, RewardModelConfig
from lm.posttrain.examples import read_dialog_rows, read_pair_rows, read_problem_rows, read_prompt_rows
from lm.posttrain.policy_gradient_objective import PolicyGradient
from lm.posttrain.ppo_objective import ProximalPolicyOptimization, add_value_head
from lm.posttrain.preference_objective import PreferenceOptimization
from lm.posttrain.reward_model import add_reward_head, load_reward_model
from lm.posttrain.reward_model_objective import RewardModeling
from lm.posttrain.rollout_objective import RolloutConfig
from lm.posttrain.sft_objective import SupervisedFineTuning
from lm.tokenizer.tokenizer import Tokenizer
from lm.train.objective import Objective
from lm.train.trainer import NO_MEMORY_FOR_MODEL, Trainer
from lm.train.training_job import TrainingJob

log = logging.getLogger(__name__)

_LONG_PAIRS = "pairs have an answer beyond the model's context and are left out"


@dataclass(kw_only=True)
class PosttrainJob(TrainingJob):
    """The inputs and outputs of a post-training."""

    method: Literal["sft", "preference", "reward_model", "reinforce", "ppo"]
    model: str
    """Directory of the checkpoint to start from."""
    tokenizer: str
    """Directory of its tokenizer, with the tokens of the chat template."""
    train: str
    """File of dialogs, pairs or problems, see :mod:`lm.posttrain.examples`."""
    valid: str
    """File of held-out ones. It may have no rows."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of the method's config besides ``train``."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Weight of each reward by name: ``reinforce`` learns from them, ``ppo`` logs them."""
    reward_model: str = ""
    """Directory of the checkpoint of a reward model, for ``ppo``."""

    def input_files(self) -> list[str]:
        """Return the paths of model, tokenizer and examples."""
        return [self.model, self.tokenizer, self.train, self.valid, *([self.reward_model] if self.reward_model else [])]

    def map_paths(self, function: Callable[[str], str]) -> None:
        """Replace each path of an input by ``function`` of it."""
        self.model, self.tokenizer = function(self.model), function(self.tokenizer)
        self.train, self.valid = function(self.train), function(self.valid)
        self.reward_model = self.reward_model and function(self.reward_model)

    @contextmanager
    def prepare(self) -> Iterator[Callable[..., dict[str, Any]]]:
        """See :meth:`TrainingJob.prepare`. A process computes the rewards, if the method needs them."""
        worker = RewardWorker(self.rewards, self._rollout_config().reward_seconds) if self.rewards else None
        with worker or nullcontext():
            self._reward = worker
            with super().prepare() as run:
                yield run

    def _rollout_config(self) -> RolloutConfig:
        config = PPOConfig if self.method == "ppo" else ReinforceConfig
        return config(train=self.config, **self.settings)

    @explain_out_of_memory(NO_MEMORY_FOR_MODEL)
    def make_trainer(self, out: Path, device: torch.device) -> Trainer:
        """Load the model, and make the trainer of the method.

        Raises UserError if memory runs out, and if the processes divide the weights: rollouts and reference models need
        them whole.
        """
        if self.execution.parallel == "auto":
            self.execution = replace(self.execution, parallel="ddp")
        if self.execution.parallel in ("zero2", "fsdp"):
            raise UserError(
                f"execution.parallel is {self.execution.parallel}, but post-training needs whole weights in each "
                "process; set it to auto, ddp or zero1."
            )
        torch.manual_seed(self.config.seed)  # checkpoints hold the state of the generator
        tokenizer = Tokenizer.load(self.tokenizer)
        model = load_model(Path(self.model), device).train()
        _take_off_capacity(model)
        train, valid = Path(self.train), Path(self.valid)
        objective: Objective
        if self.method == "sft":
            dialogs = read_dialog_rows(train), read_dialog_rows(valid)
            objective = SupervisedFineTuning(self.config, model, tokenizer, *dialogs, self.digests)
            rows = objective.train
            _warn(rows.dropped, len(dialogs[0]), "dialogs have no answer within the model's context and are left out")
            _warn(rows.cut, len(dialogs[0]), "dialogs are longer than the model's context and are cut at their end")
        elif self.method == "preference":
            preference = PreferenceConfig(train=self.config, **self.settings)
            pairs = read_pair_rows(train), read_pair_rows(valid)
            objective = PreferenceOptimization(preference, model, tokenizer, *pairs, self.digests, out)
            _warn(objective.left_out, len(pairs[0]), _LONG_PAIRS)
        elif self.method == "reward_model":
            config = RewardModelConfig(train=self.config, **self.settings)
            pairs = read_pair_rows(train), read_pair_rows(valid)
            objective = RewardModeling(config, add_reward_head(model), tokenizer, *pairs, self.digests)
            _warn(objective.left_out, len(pairs[0]), _LONG_PAIRS)
        elif self.method == "ppo":
            ppo = PPOConfig(train=self.config, **self.settings)
            prompts = read_prompt_rows(train), read_prompt_rows(valid)
            reward_model = load_reward_model(Path(self.reward_model), device)
            objective = ProximalPolicyOptimization(
                ppo, add_value_head(model), reward_model, tokenizer, *prompts, self._reward, self.digests, out
            )
        elif self._reward:
            problems = read_problem_rows(train), read_problem_rows(valid)
            reinforce = ReinforceConfig(train=self.config, **self.settings)
            objective = PolicyGradient(reinforce, model, tokenizer, *problems, self._reward, self.digests, out)
        else:
            raise UserError("The job of reinforce names no rewards.")
        trainer = Trainer(self.config, model, objective, self.execution, out)
        if trainer.balance:  # small batches say little about the load, and rollouts need the choices of the updates
            trainer.balance.freeze_biases()
        return trainer


def _warn(count: int, total: int, problem: str) -> None:
    """Log how many examples a training does not use as they are."""
    if count and get_rank() == 0:
        log.warning("%d of %d %s.", count, total, problem)


def _take_off_capacity(model: TransformerLM) -> None:
    """Let experts take all tokens, as rollouts and reference models do. Padding would use the places of tokens, too."""
    if model.config.moe is None or model.config.moe.capacity_factor is None:
        return
    log.info("model.moe.capacity_factor does not count in post-training: no token is dropped.")
    moe = replace(model.config.moe, capacity_factor=None)
    model.config = replace(model.config, moe=moe)
    for layer in model.layers:
        if isinstance(layer.ffn, MoE):
            layer.ffn.config = moe
