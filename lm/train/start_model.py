"""The model that a training continues from: which options may differ from it.

Importing this module does not import torch, so that a plan is fast.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lm.common.errors import UserError
from lm.model.config import ModelConfig

_FREE_FIELDS = ("context_length", "rope_theta", "rope_scaling")  # any weights compute with any of these
_FREE_BALANCE = ("aux_loss_weight", "z_loss_weight", "bias_update_rate", "capacity_factor")  # of a mixture of experts


def continued_config(start: ModelConfig, stated: Mapping[str, Any]) -> ModelConfig:
    """Return the config of a training that continues from a model with the config ``start``.

    ``stated`` are the fields of ModelConfig that the user set. Context and rotary positions may differ from ``start``,
    as to train for longer texts, and so may the balance of experts, except for whether they have a bias. Raises
    UserError for another field that differs.
    """
    for name, value in stated.items():
        if not _is_free(name, value, start) and value != getattr(start, name):
            raise UserError(
                f"model.{name} {value!r} conflicts with train.init_from, whose model has {getattr(start, name)!r}; "
                f"leave model.{name} out."
            )
    return replace(start, **stated)


def _is_free(name: str, value: Any, start: ModelConfig) -> bool:
    """Return whether the weights of a model with the config ``start`` compute with this value of a field too."""
    if name == "moe" and value is not None and start.moe is not None:
        same_balance = replace(value, **{field: getattr(start.moe, field) for field in _FREE_BALANCE})
        return same_balance == start.moe and bool(value.bias_update_rate) == bool(start.moe.bias_update_rate)
    return name in _FREE_FIELDS
