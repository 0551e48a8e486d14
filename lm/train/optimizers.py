"""The optimizers of a training and their parameter groups."""

from typing import Any

import torch

from lm.model.roles import HIDDEN_MATRICES
from lm.model.transformer import TransformerLM
from lm.optim.adamw import AdamW
from lm.optim.muon import Muon
from lm.train.config import TrainConfig


def make_optimizers(model: TransformerLM, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Make the optimizers of the parameters of ``model``: matrices have weight decay, norm gains do not.

    The learning rate of a group is that of the schedule times ``lr_scale``, 1 if the group has none.
    """
    hidden, matrices, gains, embedding = [], [], [], []
    roles = model.parameter_roles()
    for name, parameter in model.named_parameters():
        if roles[name] == "gain":
            gains.append(parameter)
        elif config.optimizer == "muon" and roles[name] in HIDDEN_MATRICES:
            hidden.append(parameter)
        elif roles[name] == "embedding" and config.embedding_lr_scale != 1:
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
