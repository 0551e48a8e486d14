"""Sampling of the next tokens from a model's logits.

Sources: CS336 assignment 1 (section 6); Fan et al. 2018 (top-k); Holtzman et al. 2020 (top-p); Nguyen et al. 2024
(min-p).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lm.inference.config import SampleConfig
from lm.model.functional import softmax

_PARTIAL_SORT_SIZE = 512  # tokens; usually enough for top-k and top-p, and faster than sorting the vocabulary
_TINY = torch.finfo(torch.float32).tiny


class Sampler:
    """Samples the next tokens of a batch whose rows have settings of their own, held as tensors (B, 1)."""

    def __init__(self, settings: list[SampleConfig], device: torch.device) -> None:
        def column(name: str) -> Tensor:
            return torch.tensor([[getattr(row, name)] for row in settings], dtype=torch.float32, device=device)

        self.temperature, self.top_k, self.top_p, self.min_p = map(column, ("temperature", "top_k", "top_p", "min_p"))
        self.is_greedy = all(row.temperature < _TINY for row in settings)
        self.has_top_k_or_p = any(row.top_k or row.top_p < 1 for row in settings)
        self.has_min_p = any(row.min_p > 0 for row in settings)

    def sample(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """Return the next ids (B,) for logits (B, V) and random numbers ``uniform`` (B,) in (0, 1]."""
        if self.is_greedy:
            return logits.argmax(-1)
        cumulative = self.probabilities(logits).cumsum(-1)
        return torch.searchsorted(cumulative, uniform[:, None].to(cumulative) * cumulative[:, -1:]).squeeze(-1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the sampling distribution (B, V) for logits (B, V).

        Applies temperature, top-k, top-p of the remaining probability, and min-p, in this order. The most likely token
        always stays; at temperature 0 it has probability 1. If all logits of a row are -inf, its tokens are equally
        likely.
        """
        greedy = torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        if self.is_greedy:
            return greedy
        # A penalty near 0 or a broken model can make infinities and nan; sampling must still return an id.
        logits = logits.float().nan_to_num(-math.inf, torch.finfo(torch.float32).max, -math.inf)
        largest = logits.amax(-1, keepdim=True)
        logits = (logits - largest).masked_fill(largest == -math.inf, 0.0)
        probabilities = softmax(logits / self.temperature.clamp(min=_TINY))
        if self.has_top_k_or_p:
            probabilities = self._apply_top_k_and_p(probabilities)
        if self.has_min_p:
            threshold = self.min_p * probabilities.amax(-1, keepdim=True)
            probabilities = probabilities.masked_fill(probabilities < threshold, 0.0)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return torch.where(self.temperature < _TINY, greedy, probabilities)

    def _apply_top_k_and_p(self, probabilities: Tensor) -> Tensor:
        """Set the probability of all tokens outside top-k and top-p to 0."""
        ordered, ids = self._sort(probabilities)
        rank = torch.arange(ordered.shape[-1], device=ordered.device)
        ordered = ordered.masked_fill((rank >= self.top_k) & (self.top_k > 0), 0.0)
        cumulative = ordered.cumsum(-1)
        total = torch.where(self.top_k > 0, cumulative[..., -1:], 1.0)
        before = cumulative - ordered  # the probability of all more likely tokens
        is_outside = (before >= self.top_p * total) & (self.top_p < 1)
        is_outside[..., 0] = False
        return torch.zeros_like(probabilities).scatter_(-1, ids, ordered.masked_fill_(is_outside, 0.0))

    def _sort(self, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """Return all probabilities that top-k and top-p need in descending order, lower ids first, and their ids."""
        # On a GPU, reading the result of the check would wait for the device.
        if probabilities.device.type == "cpu" and probabilities.shape[-1] > 4 * _PARTIAL_SORT_SIZE:
            top = probabilities.topk(_PARTIAL_SORT_SIZE)
            is_certain = top.values > top.values[:, -1:]  # the smallest may tie with tokens outside
            has_top_p = (self.top_p < 1) & ((top.values * is_certain).sum(-1, keepdim=True) >= self.top_p)
            if torch.where(self.top_k > 0, self.top_k <= is_certain.sum(-1, keepdim=True), has_top_p).all():
                ids = top.indices.sort(-1).values
                values, order = probabilities.gather(-1, ids).sort(stable=True, dim=-1, descending=True)
                return values, ids.gather(-1, order)
        return probabilities.sort(stable=True, dim=-1, descending=True)


class TokenScore(NamedTuple):
    """How likely a model finds a token."""

    logprob: float
    """Log-probability in nats, at temperature 1 and without edits of the logits."""
    alternatives: list[tuple[int, float]]
    """The most likely ids and their log-probabilities, the most likely first."""


def score_tokens(logits: Tensor, ids: Tensor, num_alternatives: int) -> list[TokenScore]:
    """Return the scores of ``ids`` (N,) under logits (N, V), each with ``num_alternatives``, at most V."""
    logits = logits.float()
    normalizer = logits.logsumexp(-1, keepdim=True)
    logprobs = (logits.gather(-1, ids[:, None]) - normalizer).squeeze(-1).tolist()
    if not num_alternatives:
        return [TokenScore(logprob, []) for logprob in logprobs]
    top = logits.topk(min(num_alternatives, logits.shape[-1]))
    alternatives = zip(top.indices.tolist(), (top.values - normalizer).tolist(), strict=True)
    return [
        TokenScore(logprob, list(zip(*row, strict=True))) for logprob, row in zip(logprobs, alternatives, strict=True)
    ]
