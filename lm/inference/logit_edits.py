"""Edits of a generation's logits before a token is sampled: penalties for earlier tokens, and biases.

Sources: Keskar et al. 2019 (repetition penalty); OpenAI's API reference (frequency and presence penalty, logit bias).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogitEdits:
    """The edits that OpenAI's API adds to the repetition penalty of :class:`lm.inference.config.SampleConfig`."""

    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time that it was sampled. The prompt does not count."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that was sampled at least once."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logit of a token id."""


class LogitEditor:
    """Edits the logits of one generation: repetition penalty, then frequency and presence penalty, then biases."""

    def __init__(
        self,
        edits: LogitEdits,
        repetition_penalty: float,
        prompt: Sequence[int],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._edits, self._repetition_penalty = edits, repetition_penalty
        self._seen: Tensor | None = None  # (V,) tokens of the prompt and the new text
        if repetition_penalty != 1:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._seen[list(prompt)] = True
        self._counts: Tensor | None = None  # (V,) times that a token was sampled
        if edits.frequency_penalty or edits.presence_penalty:
            self._counts = torch.zeros(vocab_size, device=device)
        self._bias_ids = torch.tensor(list(edits.logit_bias), dtype=torch.int64, device=device)
        self._biases = torch.tensor(list(edits.logit_bias.values()), dtype=torch.float32, device=device)

    @staticmethod
    def is_needed(edits: LogitEdits, repetition_penalty: float) -> bool:
        """Return whether the edits change any logits."""
        return repetition_penalty != 1 or edits != LogitEdits()

    def edit(self, logits: Tensor) -> Tensor:
        """Return edited logits (V,) in float32."""
        logits = logits.float()
        if self._seen is not None:
            penalized = torch.where(logits > 0, logits / self._repetition_penalty, logits * self._repetition_penalty)
            logits = torch.where(self._seen, penalized, logits)
        if self._counts is not None:
            logits = logits - self._edits.frequency_penalty * self._counts
            logits = logits - self._edits.presence_penalty * (self._counts > 0)
        return logits.index_add(0, self._bias_ids, self._biases) if len(self._bias_ids) else logits

    def record(self, token_id: int) -> None:
        """Count a sampled token."""
        if self._seen is not None:
            self._seen[token_id] = True
        if self._counts is not None:
            self._counts[token_id] += 1
