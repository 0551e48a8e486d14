"""The optimizers of a training and their parameter groups."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lm.distributed.plan import Parallel
from lm.model.adapter import trained_parameters
from lm.model.linear import HIDDEN_MATRICES
from lm.model.transformer import TransformerLM
from lm.optim.adamw import AdamW
from lm.optim.muon import Muon
from lm.optim.normuon import NorMuon
from lm.optim.soap_muon import SoapMuon
from lm.optim.weight_average import WeightAverage
from lm.train.config import TrainConfig

_MATRIX_OPTIMIZERS: dict[str, type[Muon]] = {"muon": Muon, "normuon": NorMuon, "soap_muon": SoapMuon}


def whole_parameters(model: TransformerLM, config: TrainConfig) -> set[nn.Parameter]:
    """Return the parameters whose optimizer needs whole matrices."""
    roles = model.parameter_roles()
    if config.optimizer not in _MATRIX_OPTIMIZERS:
        return set()
    return {p for name, p in trained_parameters(model).items() if roles[name] in HIDDEN_MATRICES}


def make_optimizers(model: TransformerLM, config: TrainConfig, parallel: Parallel) -> list[torch.optim.Optimizer]:
    """Make the optimizers of the trained parameters: matrices have weight decay, norm weights and biases do not.

    The learning rate of a group is that of the schedule times ``lr_scale``, 1 by default; see :func:`set_rates`.
    """
    hidden: list[nn.Parameter] = []
    groups: dict[str, dict[str, Any]] = {
        "matrices": {"params": [], "weight_decay": config.weight_decay},
        "vectors": {"params": [], "weight_decay": 0.0},
    }
    if config.vector_beta2 is not None:
        groups["vectors"]["betas"] = (config.beta1, config.vector_beta2)
    scales = {"vectors": config.vector_lr_scale, "embedding": config.embedding_lr_scale, "head": config.head_lr_scale}
    roles = model.parameter_roles()
    for name, parameter in trained_parameters(model).items():
        role = roles[name]
        if config.optimizer in _MATRIX_OPTIMIZERS and role in HIDDEN_MATRICES:
            hidden.append(parameter)
            continue
        group: str = "vectors" if role in ("norm", "bias") else role if scales.get(role, 1) != 1 else "matrices"
        groups.setdefault(group, {"params": [], "weight_decay": config.weight_decay})["params"].append(parameter)
    for group_name, options in groups.items():
        if (scale := scales.get(group_name, 1)) != 1:
            options["lr_scale"] = scale
    is_cautious = config.weight_decay_rule == "cautious"
    betas = config.beta1, config.beta2
    optimizers: list[torch.optim.Optimizer] = [
        parallel.make_optimizer(AdamW, groups.values(), lr=config.max_lr, betas=betas, is_cautious=is_cautious)
    ]
    if hidden:
        optimizers.append(
            parallel.make_optimizer(
                _MATRIX_OPTIMIZERS[config.optimizer],
                hidden,
                lr=config.max_lr,
                weight_decay=config.weight_decay,
                product_dtype=torch.bfloat16 if config.precision == "bfloat16" else None,
                is_cautious=is_cautious,
            )
        )
    if config.weight_decay_rule == "scheduled":
        for options in parameter_groups(optimizers):
            options["max_weight_decay"] = options["weight_decay"]
    return optimizers


def make_average(model: TransformerLM, config: TrainConfig) -> WeightAverage | None:
    """Make the average of the trained parameters, if the training ends with one."""
    return WeightAverage(trained_parameters(model).values()) if config.average_steps else None


def parameter_groups(optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """Return the parameter groups of all optimizers."""
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def copy_options(optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """Return the options of each parameter group."""
    return [{key: group[key] for key in group if key != "params"} for group in parameter_groups(optimizers)]


def replace_options(optimizers: Sequence[torch.optim.Optimizer], options: Sequence[dict[str, Any]]) -> None:
    """Give the parameter groups these options and no others. A checkpoint may have been saved with others."""
    for group, own in zip(parameter_groups(optimizers), options, strict=True):
        for key in group.keys() - own.keys() - {"params"}:
            del group[key]
        group.update(own)


def set_rates(optimizers: Sequence[torch.optim.Optimizer], lr: float, max_lr: float) -> None:
    """Set the learning rate of each group for a step with the rate ``lr`` of the schedule, and a scheduled weight
    decay in proportion to it."""
    for group in parameter_groups(optimizers):
        group["lr"] = lr * group.get("lr_scale", 1.0)
        if "max_weight_decay" in group:
            group["weight_decay"] = group["max_weight_decay"] * lr / (max_lr or 1.0)
