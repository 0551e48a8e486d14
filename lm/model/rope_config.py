"""Configuration of scaled rotary positions. This module does not import torch, so that the command line starts fast."""

import math
from dataclasses import dataclass
from typing import Literal

from lm.common.config import PYDANTIC_CONFIG, bounded_field, validate_fields
from lm.common.errors import UserError


@dataclass(frozen=True)
class RopeScaling:
    """Slower rotary frequencies, for a context longer than that of the first training.

    Sources: Chen et al. 2023 (linear: position interpolation); Meta's Llama 3.1 (llama3).
    """

    __pydantic_config__ = PYDANTIC_CONFIG

    kind: Literal["linear", "llama3"] = "llama3"
    """linear: divide all frequencies by factor. llama3: divide low ones, keep high ones, and blend those between."""
    factor: float = bounded_field(8.0, ge=1, lt=math.inf)
    """How much longer the context became."""
    low_freq_factor: float = bounded_field(1.0, gt=0, lt=math.inf)
    """Of llama3: a frequency with fewer turns than this in original_context_length is divided by factor."""
    high_freq_factor: float = bounded_field(4.0, gt=0, lt=math.inf)
    """Of llama3: a frequency with more turns than this in original_context_length is kept. Above low_freq_factor."""
    original_context_length: int = bounded_field(8192, ge=1)
    """Of llama3: context length of the first training, in tokens."""

    def __post_init__(self) -> None:
        validate_fields(self, "model.rope_scaling")
        if self.high_freq_factor <= self.low_freq_factor:
            raise UserError(
                f"model.rope_scaling.high_freq_factor {self.high_freq_factor} must be above low_freq_factor "
                f"{self.low_freq_factor}."
            )
