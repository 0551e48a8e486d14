"""The recipe of a training: how long, how fast, by which optimizer, and what is looked at on the way."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from lm.bounds import FORM, bounded, check_bounds
from lm.errors import UserError
from lm.model import TransformerLM
from lm.optim import AdamW, Muon, lr_cosine_schedule, lr_wsd_schedule


@dataclass(frozen=True)
class TrainConfig:
    """How the model is trained. Tokens seen: steps · batch_size · model.context_length."""

    __pydantic_config__ = FORM

    steps: int = bounded(5_000, ge=1)
    """Optimizer steps."""
    batch_size: int = bounded(32, ge=1)
    """Sequences a step."""
    micro_batches: int = bounded(1, ge=1)
    """Parts of a batch that are computed one after the other and their gradients added: more of them, less memory."""
    data_order: Literal["random", "epochs"] = "random"
    """random draws each sequence out of the whole text; epochs shows every window once, in a new order each epoch."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw for every parameter; or muon for the matrices of the blocks and adamw for the rest."""
    max_lr: float = bounded(1e-3, ge=0)
    """Learning rate after the warm-up."""
    min_lr: float = bounded(1e-4, ge=0)
    """Learning rate at the end."""
    embedding_lr_scale: float = bounded(1.0, gt=0, lt=math.inf)
    """The embedding's learning rate over that of the rest. Most of its rows are touched by few steps."""
    warmup_steps: int = bounded(200, ge=0)
    """Steps over which the learning rate rises from 0."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """After the warm-up: cosine falls all the way; wsd (warm-up, stable, decay) stays, and then falls in a line."""
    decay_fraction: float = bounded(0.2, ge=0, le=1)
    """Part of the steps, the last ones, over which wsd falls."""
    beta1: float = bounded(0.9, ge=0, lt=1)
    """Decay of AdamW's mean of gradients."""
    beta2: float = bounded(0.95, ge=0, lt=1)
    """Decay of AdamW's mean of squared gradients."""
    weight_decay: float = bounded(0.1, ge=0)
    """Decoupled weight decay of the matrices; norm gains have none."""
    max_grad_norm: float = bounded(1.0, gt=0)
    """Gradients are scaled down to this common L2 norm when theirs is greater."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 runs the matrix products in it (autocast); weights and optimizer state stay float32."""
    seed: int = bounded(0, ge=0, lt=1 << 63)
    """Seed of the initial weights and of the batches."""
    eval_interval: int = bounded(500, ge=1)
    """Steps between two validations, each with a sample. The last step is validated too."""
    eval_sequences: int = bounded(64, ge=1)
    """Sequences of a validation, evenly spread over the validation text: the same ones each time, so that the best
    checkpoint can be told. The end of a run is measured on the whole text."""
    checkpoint_interval: int = bounded(500, ge=1)
    """Steps between two checkpoints."""
    keep_checkpoints: int = bounded(2, ge=1)
    """Newest checkpoints kept; the best one is kept besides."""
    patience: int | None = bounded(None, ge=1)
    """Validations in a row without a better loss after which the training ends early. Default: it never does."""
    sample_prompts: list[str] = field(default_factory=lambda: ["Once upon a time"])
    """Prompts of the samples drawn at each validation."""
    sample_tokens: int = bounded(60, ge=0)
    """Most tokens of such a sample."""

    def __post_init__(self) -> None:
        check_bounds(self, "train")
        if self.min_lr > self.max_lr:
            raise UserError(f"train.min_lr {self.min_lr} must not be above train.max_lr {self.max_lr}.")
        if self.batch_size % self.micro_batches:
            raise UserError(
                f"train.batch_size {self.batch_size} must be a multiple of train.micro_batches {self.micro_batches}."
            )

    def lr(self, step: int) -> float:
        """The learning rate of a step, from 1."""
        if self.schedule == "cosine":
            return lr_cosine_schedule(step, self.max_lr, self.min_lr, self.warmup_steps, self.steps)
        decay = round(self.decay_fraction * self.steps)
        return lr_wsd_schedule(step, self.max_lr, self.min_lr, self.warmup_steps, decay, self.steps)


def make_optimizers(model: TransformerLM, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """The optimizers of a run over the parameters of ``model``: matrices decayed, norm gains not. A group's
    ``lr_scale`` is what the schedule's learning rate is multiplied by for it."""
    hidden, matrices, gains, embedding = [], [], [], []
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            gains.append(parameter)
        elif config.optimizer == "muon" and name.startswith("layers."):
            hidden.append(parameter)
        elif name.startswith("token_embeddings.") and config.embedding_lr_scale != 1:
            embedding.append(parameter)
        else:
            matrices.append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    if embedding:
        groups.append({"params": embedding, "weight_decay": config.weight_decay, "lr_scale": config.embedding_lr_scale})
    optimizers: list[torch.optim.Optimizer] = [AdamW(groups, config.max_lr, (config.beta1, config.beta2))]
    if hidden:
        optimizers.append(Muon(hidden, config.max_lr, weight_decay=config.weight_decay))
    return optimizers
