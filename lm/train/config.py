"""The hyperparameters of a training, and the config of a model that a training continues from.

Importing this module does not import torch, so that the command line starts fast.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from lm.common.config import Config, bounded_field
from lm.common.errors import UserError
from lm.model.config import ModelConfig, MoEConfig

WeightDecayRule = Literal["constant", "scheduled", "cautious"]
_LATER_FIELDS = frozenset(
    ["max_seconds", "head_lr_scale", "vector_lr_scale", "vector_beta2", "weight_decay_rule", "average_tail"]
)


@dataclass(frozen=True)
class TrainConfig(Config, section="train"):
    """How the model is trained. Training tokens: steps · batch_size · model.context_length."""

    init_from: str = ""
    """Model to continue from, with its tokenizer and its architecture: a run below the root, or a directory of Hugging
    Face or Meta. Default: a new model."""
    steps: int = bounded_field(5_000, ge=1)
    """Optimizer steps; with max_seconds, their maximum."""
    max_seconds: float | None = bounded_field(None, gt=0, lt=math.inf)
    """Time limit for training, with its evaluations and checkpoints except the last ones. The learning rate follows the
    fraction of the time or of the steps that is over, whichever is larger. So the speed of the machine decides the
    result. Default: no limit."""
    batch_size: int = bounded_field(32, ge=1)
    """Sequences per step, over all processes."""
    gradient_accumulation_steps: int = bounded_field(1, ge=1)
    """Micro-batches per step, whose gradients are added. More micro-batches need less memory."""
    data_order: Literal["random", "shuffled_epochs"] = "random"
    """random: sequences start anywhere in the text. shuffled_epochs: each epoch has all windows in a new order."""
    optimizer: Literal["adamw", "muon", "normuon", "soap_muon"] = "adamw"
    """adamw: for all parameters. The others are for the matrices of the blocks, with adamw for the other parameters.
    muon: momentum with an orthogonalized update. normuon: the same, with equal updates for each neuron. soap_muon: muon
    with a momentum that is preconditioned in the eigenbasis of the gradients; it needs twice the memory for state."""
    max_lr: float = bounded_field(1e-3, ge=0, lt=math.inf)
    """Peak learning rate, after the warm-up."""
    min_lr: float = bounded_field(1e-4, ge=0, lt=math.inf)
    """Learning rate of the last step."""
    embedding_lr_scale: float = bounded_field(1.0, gt=0, lt=math.inf)
    """Factor for the learning rate of the token embedding. Most rows of the embedding have a gradient in few steps."""
    head_lr_scale: float = bounded_field(1.0, gt=0, lt=math.inf)
    """Factor for the learning rate of the output head, if the model does not share it with the token embedding."""
    vector_lr_scale: float = bounded_field(1.0, gt=0, lt=math.inf)
    """Factor for the learning rate of norm weights and biases."""
    warmup_steps: int = bounded_field(200, ge=0)
    """Steps over which the learning rate rises from 0. Less than steps; with wsd, at most steps minus the decay."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """Learning rate after the warm-up. cosine: cosine decay. wsd (warm-up, stable, decay): constant, then linear."""
    decay_fraction: float = bounded_field(0.2, ge=0, le=1)
    """Fraction of the steps, at the end, over which wsd decays."""
    beta1: float = bounded_field(0.9, ge=0, lt=1)
    """AdamW's decay rate for the mean of gradients."""
    beta2: float = bounded_field(0.95, ge=0, lt=1)
    """AdamW's decay rate for the mean of squared gradients."""
    vector_beta2: float | None = bounded_field(None, ge=0, lt=1)
    """beta2 of norm weights and biases. Default: beta2."""
    weight_decay: float = bounded_field(0.1, ge=0, lt=math.inf)
    """Decoupled weight decay of matrices: in each step they shrink by this times the learning rate. Norm weights and
    biases have no weight decay."""
    weight_decay_rule: WeightDecayRule = "constant"
    """constant: weight_decay stays the same. scheduled: it follows the schedule of the learning rate, from weight_decay
    at max_lr. cautious: only weights that the update moves toward 0 shrink."""
    average_tail: float = bounded_field(0.0, ge=0, le=1)
    """Fraction of the steps, at the end, over which the weights are averaged. The checkpoint "average" has the mean,
    and is the result of the training if its loss is lower than that of the best checkpoint. 0: no average."""
    max_grad_norm: float = bounded_field(1.0, gt=0, lt=math.inf)
    """Gradients are clipped to this global L2 norm."""
    precision: Literal["auto", "float32", "bfloat16"] = "float32"
    """Type of matmuls (autocast); auto: bfloat16 if the device has instructions for it. Weights and optimizer
    state are float32."""
    seed: int = bounded_field(0, ge=0, lt=1 << 63)
    """Seed of the initial weights and of the batches."""
    eval_interval: int = bounded_field(500, ge=1)
    """Steps between two evaluations, each with samples; with max_seconds, they pass with the time, as the schedule's
    do. The last step is evaluated too."""
    eval_sequences: int = bounded_field(64, ge=1)
    """Sequences per evaluation, evenly spread over the validation text and always the same, so that losses compare. At
    the end, the model is evaluated on the whole text."""
    checkpoint_interval: int = bounded_field(500, ge=1)
    """Steps between two checkpoints; with max_seconds, they pass with the time."""
    keep_checkpoints: int = bounded_field(2, ge=1)
    """Number of newest checkpoints to keep. The best checkpoint is always kept."""
    patience: int | None = bounded_field(None, ge=1)
    """Consecutive evaluations without a better result after which training ends early. It needs validation data.
    Default: no early stopping."""
    sample_prompts: list[str] = field(default_factory=lambda: ["Once upon a time"])
    """Prompts of the samples at each evaluation."""
    sample_tokens: int = bounded_field(60, ge=0)
    """Maximum number of tokens per sample."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_lr > self.max_lr:
            raise UserError(f"train.min_lr {self.min_lr} must not be above train.max_lr {self.max_lr}.")
        if self.batch_size % self.gradient_accumulation_steps:
            raise UserError(
                f"train.batch_size {self.batch_size} must be a multiple of train.gradient_accumulation_steps "
                f"{self.gradient_accumulation_steps}."
            )
        if self.warmup_steps >= self.steps:
            raise UserError(
                f"train.warmup_steps {self.warmup_steps} must be below train.steps {self.steps}, "
                "so that the learning rate reaches train.max_lr."
            )
        if self.schedule == "wsd" and self.warmup_steps + self.decay_steps > self.steps:
            raise UserError(
                f"train.warmup_steps {self.warmup_steps} and the {self.decay_steps} steps of train.decay_fraction "
                f"{self.decay_fraction} are more than train.steps {self.steps}; lower one of them."
            )

    @property
    def identity(self) -> dict[str, Any]:
        """The fields that decide the output of a stage. Of the model to continue from, its content does. Later fields
        are left out while they have their defaults, so that trainings from before they existed stay cached."""
        later = {entry.name: entry.default for entry in fields(self) if entry.name in _LATER_FIELDS}
        left_out = {"init_from"} | {name for name, default in later.items() if getattr(self, name) == default}
        return {name: value for name, value in asdict(self).items() if name not in left_out}

    @property
    def decay_steps(self) -> int:
        """Number of steps over which wsd decays."""
        return round(self.decay_fraction * self.steps)

    @property
    def average_steps(self) -> int:
        """Number of steps at the end over which the weights are averaged."""
        return round(self.average_tail * self.steps)

    def lr(self, step: int) -> float:
        """Return the learning rate of a step; the first step is 1."""
        from lm.optim.schedules import lr_cosine_schedule, lr_wsd_schedule

        if self.schedule == "cosine":
            return lr_cosine_schedule(step, self.max_lr, self.min_lr, self.warmup_steps, self.steps)
        return lr_wsd_schedule(step, self.max_lr, self.min_lr, self.warmup_steps, self.decay_steps, self.steps)


def fitting_warmup(train: Mapping[str, Any], base: Mapping[str, Any]) -> int:
    """Return the warm-up for the fields of a training that were changed from those of ``base``, but not its warm-up. If
    it no longer fits into the steps, it is as large a part of them as in ``base``."""
    warmup, steps = train["warmup_steps"], train["steps"]
    decay = round(train["decay_fraction"] * steps) if train["schedule"] == "wsd" else 0
    if warmup < steps and warmup + decay <= steps:
        return int(warmup)
    return int(base["warmup_steps"] * max(steps, 0) // base["steps"])


def continued_config(start: ModelConfig, stated: Mapping[str, Any]) -> ModelConfig:
    """Return the config of a training that continues from a model with the config ``start``.

    ``stated`` are the fields of ModelConfig that the user set. Of ``moe``, only fields that differ from the default
    count. Context and rotary positions may differ from ``start``, e.g. to train for longer texts. The balance of
    experts may differ too, except whether they have a bias. Raises UserError for another field that differs.
    """
    stated = dict(stated)
    experts = stated.pop("moe", None) if start.moe is not None else None
    # Any weights compute with any of these.
    _check_same(stated, start, ("context_length", "rope_theta", "rope_scaling"), "model")
    if experts is None or start.moe is None:
        return replace(start, **stated)
    usual = MoEConfig()
    balance = {name: value for name, value in vars(experts).items() if value != getattr(usual, name)}
    free = {"aux_loss_weight", "z_loss_weight", "capacity_factor"}
    _check_same(balance, start.moe, free | ({"bias_update_rate"} if start.moe.bias_update_rate else set()), "model.moe")
    return replace(start, **stated, moe=replace(start.moe, **balance))


def _check_same(stated: Mapping[str, Any], start: ModelConfig | MoEConfig, free: Collection[str], section: str) -> None:
    """Raise UserError for a field that differs from ``start`` and is not ``free``: its weights need the same."""
    for name, value in stated.items():
        if name not in free and value != getattr(start, name):
            raise UserError(
                f"{section}.{name} {value!r} conflicts with train.init_from, whose model has {getattr(start, name)!r}; "
                f"leave {section}.{name} out."
            )
