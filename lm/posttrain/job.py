"""The job of a post-training method: fine-tuning, preferences or rewards, from a model that exists."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Generic, TypeVar

import torch

from lm.common.errors import UserError
from lm.hardware.device import explain_out_of_memory
from lm.model.moe import MoE
from lm.model.transformer import TransformerLM
from lm.posttrain.config import Method
from lm.posttrain.data import read_example_rows
from lm.tokenizer.tokenizer import Tokenizer
from lm.train.frozen_base import FrozenBase, load_start, refuse_tensor_parallel
from lm.train.trainer import Trainer
from lm.train.training_job import NO_MEMORY_FOR_MODEL, TrainingJob

log = logging.getLogger(__name__)

T = TypeVar("T")

# Named and not imported: they stand above this module, and a training runs the code of its own method only.
_OBJECTIVES: dict[Method, str] = {
    "sft": "lm.posttrain.objectives.sft:SupervisedFineTuning",
    "distill": "lm.posttrain.objectives.distillation:Distillation",
    "preference": "lm.posttrain.objectives.dpo:DPO",
    "reward_model": "lm.posttrain.objectives.reward_model:RewardModeling",
    "reinforce": "lm.posttrain.objectives.grpo:GRPO",
    "ppo": "lm.posttrain.objectives.ppo:PPO",
}


@dataclass(frozen=True)
class ObjectiveInputs(Generic[T]):
    """The model that an objective starts from, and its examples."""

    model: TransformerLM
    tokenizer: Tokenizer
    train: Sequence[T]
    valid: Sequence[T]
    """Held-out examples."""
    digests: dict[str, str] = field(default_factory=dict)
    """Checksums of the input by name."""
    base: FrozenBase | None = None
    """The frozen model below the adapter, if ``model`` has one."""
    out: Path = Path()
    """Directory for what a resumed training needs."""

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device


@dataclass(kw_only=True)
class PosttrainJob(TrainingJob):
    """The inputs and outputs of a post-training."""

    method: Method
    model: str
    """Directory of the checkpoint to start from."""
    tokenizer: str
    """Directory of its tokenizer, with the tokens of the chat template."""
    train: str
    """File of dialogs, pairs or problems, see :mod:`lm.posttrain.data`."""
    valid: str
    """File of held-out ones. It may have no rows."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of the method's config besides ``train``."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Weight of each reward by name: ``reinforce`` learns from them, ``ppo`` and ``distill`` log them."""
    reward_model: str = ""
    """Directory of the checkpoint of a reward model, for ``ppo``."""
    teacher: str = ""
    """Directory of the checkpoint of a teacher, for ``distill``."""

    def input_files(self) -> list[str]:
        """Return the paths of models, tokenizer and examples."""
        return [self.model, self.tokenizer, self.train, self.valid, *filter(None, (self.reward_model, self.teacher))]

    def map_paths(self, function: Callable[[str], str]) -> None:
        """Replace each path of an input by ``function`` of it."""
        self.model, self.tokenizer = function(self.model), function(self.tokenizer)
        self.train, self.valid = function(self.train), function(self.valid)
        self.reward_model = self.reward_model and function(self.reward_model)
        self.teacher = self.teacher and function(self.teacher)

    @contextmanager
    def prepare(self) -> Iterator[Callable[..., dict[str, Any]]]:
        """See :meth:`TrainingJob.prepare`. The objective may enter contexts, such as a process for rewards."""
        with ExitStack() as self.contexts, super().prepare() as run:
            yield run

    @explain_out_of_memory(NO_MEMORY_FOR_MODEL)
    def make_trainer(self, out: Path, device: torch.device) -> Trainer:
        """Load the model, and make the trainer of the method.

        Raises UserError if memory runs out, and if the processes shard the weights: rollouts and reference models need
        them whole.
        """
        if self.execution.tensor_parallel > 1 and self.method != "sft":
            raise UserError(
                f"execution.tensor_parallel is {self.execution.tensor_parallel}, but {self.method} needs whole weights "
                "in each process; set it to 1. Of post-training only sft divides the model."
            )
        refuse_tensor_parallel(self.execution, self.adapter)
        if self.execution.parallel == "auto":
            self.execution = replace(self.execution, parallel="ddp")
        if self.execution.parallel in ("zero2", "fsdp"):
            raise UserError(
                f"execution.parallel is {self.execution.parallel}, but post-training needs whole weights in each "
                "process; set it to auto, ddp or zero1."
            )
        if self.method not in _OBJECTIVES:
            raise UserError(f"The job has the unknown method {self.method!r}; known are {', '.join(_OBJECTIVES)}.")
        torch.manual_seed(self.config.seed)  # checkpoints hold the state of the generator
        tokenizer = Tokenizer.load(self.tokenizer)
        model = load_start(Path(self.model), device, self.adapter)
        _take_off_capacity(model)
        # The other methods compare probabilities, which dropout changes.
        adapter = self.adapter if self.method in ("sft", "reward_model") else replace(self.adapter, dropout=0.0)
        base = FrozenBase.adapt(model, Path(self.model), adapter, self.config.max_lr)
        objective_type = resolve_name(_OBJECTIVES[self.method])
        train, valid = (
            read_example_rows(Path(path), *objective_type.example_types) for path in (self.train, self.valid)
        )
        inputs = ObjectiveInputs(model, tokenizer, train, valid, self.digests, base, out)
        objective = objective_type.from_job(self, inputs)
        trainer = Trainer(self.config, model, objective, self.execution, out, base)
        if trainer.balance:  # small batches say little about the load, and rollouts need the choices of the updates
            trainer.balance.freeze_biases()
        return trainer


def _take_off_capacity(model: TransformerLM) -> None:
    """Let experts take all tokens, as rollouts and reference models do. Padding would use the capacity, too."""
    if model.config.moe is None or model.config.moe.capacity_factor is None:
        return
    log.info("model.moe.capacity_factor does not count in post-training: no token is dropped.")
    moe = replace(model.config.moe, capacity_factor=None)
    model.config = replace(model.config, moe=moe)
    for layer in model.layers:
        if isinstance(layer.ffn, MoE):
            layer.ffn.config = moe
