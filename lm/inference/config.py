"""Configuration of sampling. It does not import torch, so that the command line starts fast."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lm.common.config import Config, bounded_field

Quantization = Literal["none", "bfloat16", "int8"]
"""How the weights are stored for inference. none: as they are; bfloat16: 16 bits; int8: 8 bits, for CPUs. Fewer
bits are faster and a little less exact."""
Pooling = Literal["last", "mean"]
"""What the embedding of a text is: the hidden state of its last token, or the mean over its tokens."""


@dataclass(frozen=True)
class SampleConfig(Config, section="sample"):
    """How tokens are sampled, and the prompts to continue."""

    temperature: float = bounded_field(0.8, ge=0, lt=math.inf)
    """Divides the logits. Lower values are more predictable; 0 always takes the most likely token."""
    top_k: int = bounded_field(0, ge=0, le=1 << 30)
    """Samples from this many most likely tokens; 0 for all."""
    top_p: float = bounded_field(0.95, ge=0, le=1)
    """Samples from the smallest set of most likely tokens with at least this total probability; 1 for all."""
    min_p: float = bounded_field(0.0, ge=0, le=1)
    """Samples from tokens with at least this fraction of the most likely token's probability; 0 for all."""
    repetition_penalty: float = bounded_field(1.0, gt=0, lt=math.inf)
    """Above 1 makes tokens of the text so far less likely: positive logits are divided by it, negative multiplied."""
    prompts: list[str] = field(default_factory=lambda: ["Once upon a time", "One day", "The little"])
    """Texts to continue. Special tokens in them are plain text."""
    max_new_tokens: int = bounded_field(200, ge=0)
    """Maximum number of tokens to add to a prompt."""
    stop: list[str] = field(default_factory=list)
    """A sample ends before the first of these texts."""
    samples: int = bounded_field(1, ge=1)
    """Samples of each prompt."""
    seed: int = 0
    """Random seed. Sample i, counted over all prompts, has seed + i."""
    speculative_tokens: int = bounded_field(0, ge=0)
    """Max tokens guessed per step by prompt lookup; 0 turns it off. Text that repeats is generated faster, with the
    same distribution."""

    @property
    def identity(self) -> dict[str, Any]:
        """Fields that enter the cache key: all but the one that decides the speed only."""
        return {name: value for name, value in asdict(self).items() if name != "speculative_tokens"}
