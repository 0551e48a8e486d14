"""The optimizers of a training and their parameter groups."""

from typing import Any

import torch
from torch import nn

from lm.distributed.plan import Parallel
from lm.model.adapter import trained_parameters
from lm.model.linear import HIDDEN_MATRICES
from lm.model.transformer import TransformerLM
from lm.optim.adamw import AdamW
from lm.optim.muon import Muon
from lm.train.config import TrainConfig


def whole_parameters(model: TransformerLM, config: TrainConfig) -> set[nn.Parameter]:
    """Return the parameters whose optimizer needs whole matrices."""
    roles = model.parameter_roles()
    trained = trained_parameters(model)
    return {p for name, p in trained.items() if config.optimizer == "muon" and roles[name] in HIDDEN_MATRICES}


def make_optimizers(model: TransformerLM, config: TrainConfig, parallel: Parallel) -> list[torch.optim.Optimizer]:
    """Make the optimizers of the trained parameters: matrices have weight decay, norm weights and biases do not.

    The learning rate of a group is that of the schedule times ``lr_scale``; 1 by default.
    """
    hidden, matrices, vectors, embedding = [], [], [], []
    roles = model.parameter_roles()
    for name, parameter in trained_parameters(model).items():
        if roles[name] in ("norm", "bias"):
            vectors.append(parameter)
        elif config.optimizer == "muon" and roles[name] in HIDDEN_MATRICES:
            hidden.append(parameter)
        elif roles[name] == "embedding" and config.embedding_lr_scale != 1:
            embedding.append(parameter)
        else:
            matrices.append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if embedding:
        groups.append({"params": embedding, "weight_decay": config.weight_decay, "lr_scale": config.embedding_lr_scale})
    optimizers: list[torch.optim.Optimizer] = [
        parallel.make_optimizer(AdamW, groups, lr=config.max_lr, betas=(config.beta1, config.beta2))
    ]
    if hidden:
        optimizers.append(
            parallel.make_optimizer(
                Muon,
                hidden,
                lr=config.max_lr,
                weight_decay=config.weight_decay,
                product_dtype=torch.bfloat16 if config.precision == "bfloat16" else None,
            )
        )
    return optimizers
