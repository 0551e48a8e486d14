"""The model that a training continues from: which options may differ from it.

Importing this module does not import torch, so that a plan is fast.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from lm.common.errors import UserError
from lm.model.config import ModelConfig
from lm.model.moe_config import MoEConfig

_FREE_FIELDS = ("context_length", "rope_theta", "rope_scaling")  # any weights compute with any of these
_FREE_BALANCE = ("aux_loss_weight", "z_loss_weight", "capacity_factor")  # of a mixture of experts


def continued_config(start: ModelConfig, stated: Mapping[str, Any]) -> ModelConfig:
    """Return the config of a training that continues from a model with the config ``start``.

    ``stated`` are the fields of ModelConfig that the user set; of its experts, those that differ from the default.
    Context and rotary positions may differ from ``start``, as to train for longer texts, and so may the balance of
    experts, except for whether they have a bias. Raises UserError for another field that differs.
    """
    stated = dict(stated)
    experts = stated.pop("moe", None) if start.moe is not None else None
    _check(stated, start, _FREE_FIELDS, "model")
    if experts is None or start.moe is None:
        return replace(start, **stated)
    usual = MoEConfig()
    balance = {name: value for name, value in vars(experts).items() if value != getattr(usual, name)}
    free = (*_FREE_BALANCE, "bias_update_rate") if start.moe.bias_update_rate else _FREE_BALANCE
    _check(balance, start.moe, free, "model.moe")
    return replace(start, **stated, moe=replace(start.moe, **balance))


def _check(stated: Mapping[str, Any], start: ModelConfig | MoEConfig, free: Collection[str], section: str) -> None:
    """Raise UserError for a field that differs from ``start`` and is not ``free``: its weights need the same."""
    for name, value in stated.items():
        if name not in free and value != getattr(start, name):
            raise UserError(
                f"{section}.{name} {value!r} conflicts with train.init_from, whose model has {getattr(start, name)!r}; "
                f"leave {section}.{name} out."
            )
