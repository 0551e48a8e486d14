"""The model that a training continues from: which options may differ from it.

Importing this module does not import torch, so that a plan is fast.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lm.common.errors import UserError
from lm.model.config import ModelConfig

_FREE_FIELDS = ("context_length", "rope_theta", "rope_scaling")  # any weights compute with any of these


def continued_config(start: ModelConfig, stated: Mapping[str, Any]) -> ModelConfig:
    """Return the config of a training that continues from a model with the config ``start``.

    ``stated`` are the fields of ModelConfig that the user set. Context and rotary positions may differ from ``start``,
    as to train for longer texts. Raises UserError for another field that does.
    """
    for name, value in stated.items():
        if name not in _FREE_FIELDS and value != getattr(start, name):
            raise UserError(
                f"model.{name} {value!r} conflicts with train.init_from, whose model has {getattr(start, name)!r}; "
                f"leave model.{name} out."
            )
    return replace(start, **{name: value for name, value in stated.items() if name in _FREE_FIELDS})
