"""Sampling of the next tokens: edits of the logits by penalties and biases, the sampling distribution, and scores.

Sources: CS336 assignment 1 (section 6); Keskar et al. 2019 (repetition penalty); Fan et al. 2018 (top-k); Holtzman et
al. 2020 (top-p); Nguyen et al. 2024 (min-p); OpenAI's API reference (frequency and presence penalty, logit bias).
Shapes: B sequences, N tokens, V vocabulary.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lm.inference.config import SampleConfig
from lm.inference.constraints import Constraint
from lm.model.functional import softmax

_PARTIAL_SORT_SIZE = 512  # tokens; usually enough for top-k and top-p, and faster than sorting the vocabulary
_TINY, _MIN, _MAX = (getattr(torch.finfo(torch.float32), name) for name in ("tiny", "min", "max"))


@dataclass(frozen=True)
class LogitEdits:
    """Edits of OpenAI's API, beside the repetition penalty of :class:`lm.inference.config.SampleConfig`."""

    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time that it was sampled. The prompt does not count."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that was sampled at least once."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logit of a token id."""
    min_tokens: int = 0
    """vLLM's: no id that ends the text is sampled before this many others are."""


class LogitEditor:
    """Edits the logits of one generation: repetition penalty, then frequency and presence penalty, then biases.

    Last, the logits of impossible ids become -inf: with a ``constraint``, all outside its mask, see
    :meth:`lm.inference.constraints.Constraint.mask`; and before ``min_tokens`` the ``end_ids``, unless only they are
    possible.
    """

    def __init__(
        self,
        edits: LogitEdits,
        repetition_penalty: float,
        prompt: Sequence[int],
        vocab_size: int,
        device: torch.device,
        constraint: Constraint | None = None,
        end_ids: Collection[int] = (),
    ) -> None:
        self._edits, self._repetition_penalty = edits, repetition_penalty
        self._vocab_size, self._constraint = vocab_size, constraint
        self._end_ids = [token_id for token_id in end_ids if token_id < vocab_size]  # others end nothing
        self._num_sampled = 0
        self._seen_V: Tensor | None = None  # tokens of the prompt and the new text
        if repetition_penalty != 1:
            self._seen_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._seen_V[list(prompt)] = True
        self._counts_V: Tensor | None = None  # times that a token was sampled
        if edits.frequency_penalty or edits.presence_penalty:
            self._counts_V = torch.zeros(vocab_size, device=device)
        self._bias_ids = torch.tensor(list(edits.logit_bias), dtype=torch.int64, device=device)
        self._biases = torch.tensor(list(edits.logit_bias.values()), dtype=torch.float32, device=device)

    def edit(self, logits_V: Tensor) -> Tensor:
        """Return edited logits in float32."""
        logits_V = logits_V.float()
        if self._seen_V is not None:
            penalty = self._repetition_penalty
            penalized_V = torch.where(logits_V > 0, logits_V / penalty, logits_V * penalty)
            logits_V = torch.where(self._seen_V, penalized_V, logits_V)
        if self._counts_V is not None:
            logits_V = logits_V - self._edits.frequency_penalty * self._counts_V
            logits_V = logits_V - self._edits.presence_penalty * (self._counts_V > 0)
        if len(self._bias_ids):
            logits_V = logits_V.index_add(0, self._bias_ids, self._biases)
        if (mask_V := self._find_possible_ids()) is not None:
            # An infinite or undefined logit of an allowed id would make it as unlikely as the others.
            logits_V = logits_V.nan_to_num(_MIN, _MAX, _MIN).masked_fill_(~mask_V.to(logits_V.device), -math.inf)
        return logits_V

    def _find_possible_ids(self) -> Tensor | None:
        """Return which ids may come next, bool (V,); None for all."""
        mask_V = None if self._constraint is None else torch.from_numpy(self._constraint.mask(self._end_ids))
        if self._num_sampled >= self._edits.min_tokens:
            return mask_V
        longer_V = torch.ones(self._vocab_size, dtype=torch.bool) if mask_V is None else mask_V.clone()
        longer_V[self._end_ids] = False
        return longer_V if longer_V.any() else mask_V

    def record(self, token_id: int) -> None:
        """Count a sampled token. Raises ConstraintError if the constraint cannot go on."""
        self._num_sampled += 1
        if self._seen_V is not None:
            self._seen_V[token_id] = True
        if self._counts_V is not None:
            self._counts_V[token_id] += 1
        if self._constraint is not None and token_id not in self._end_ids:
            self._constraint.advance(token_id)


def edit_logits(logits_BV: Tensor, editors: Sequence[LogitEditor | None]) -> Tensor:
    """Return the logits as the editor of each row makes them, in a copy if there is one."""
    if any(editors):
        logits_BV = logits_BV.clone()
        for row, editor in enumerate(editors):
            if editor:
                logits_BV[row] = editor.edit(logits_BV[row])
    return logits_BV


class Sampler:
    """Samples the next tokens of a batch whose rows have settings of their own, held as tensors (B, 1)."""

    def __init__(self, settings: list[SampleConfig], device: torch.device) -> None:
        def column(name: str) -> Tensor:
            return torch.tensor([[getattr(row, name)] for row in settings], dtype=torch.float32, device=device)

        self.temperature, self.top_k, self.top_p, self.min_p = map(column, ("temperature", "top_k", "top_p", "min_p"))
        self.is_greedy = all(row.temperature < _TINY for row in settings)
        self.has_top_k_or_p = any(row.top_k or row.top_p < 1 for row in settings)
        self.has_min_p = any(row.min_p > 0 for row in settings)

    def sample(self, logits_BV: Tensor, uniform_B: Tensor) -> Tensor:
        """Return the next ids (B,) for random numbers ``uniform_B`` in (0, 1]."""
        if self.is_greedy:
            return logits_BV.argmax(-1)
        cumulative_BV = self.probabilities(logits_BV).cumsum(-1)
        thresholds_B1 = uniform_B[:, None].to(cumulative_BV) * cumulative_BV[:, -1:]
        return torch.searchsorted(cumulative_BV, thresholds_B1).squeeze(-1)

    def probabilities(self, logits_BV: Tensor) -> Tensor:
        """Return the sampling distribution (B, V).

        Applies temperature, top-k, top-p of the remaining probability, and min-p, in this order. The most likely token
        always stays; at temperature 0 it has probability 1. If all logits of a row are -inf, its tokens are equally
        likely.
        """
        greedy_BV = torch.zeros_like(logits_BV, dtype=torch.float32)
        greedy_BV.scatter_(-1, logits_BV.argmax(-1, keepdim=True), 1.0)
        if self.is_greedy:
            return greedy_BV
        # A penalty near 0 or a broken model can make infinities and nan; sampling must still return an id.
        logits_BV = logits_BV.float().nan_to_num(-math.inf, torch.finfo(torch.float32).max, -math.inf)
        largest_B1 = logits_BV.amax(-1, keepdim=True)
        logits_BV = (logits_BV - largest_B1).masked_fill(largest_B1 == -math.inf, 0.0)
        probabilities_BV = softmax(logits_BV / self.temperature.clamp(min=_TINY))
        if self.has_top_k_or_p:
            probabilities_BV = self._apply_top_k_and_p(probabilities_BV)
        if self.has_min_p:
            threshold = self.min_p * probabilities_BV.amax(-1, keepdim=True)
            probabilities_BV = probabilities_BV.masked_fill(probabilities_BV < threshold, 0.0)
        probabilities_BV = probabilities_BV / probabilities_BV.sum(-1, keepdim=True)
        return torch.where(self.temperature < _TINY, greedy_BV, probabilities_BV)

    def _apply_top_k_and_p(self, probabilities_BV: Tensor) -> Tensor:
        """Set the probability of all tokens outside top-k and top-p to 0."""
        ordered, ids = self._sort(probabilities_BV)
        rank = torch.arange(ordered.shape[-1], device=ordered.device)
        ordered = ordered.masked_fill((rank >= self.top_k) & (self.top_k > 0), 0.0)
        cumulative = ordered.cumsum(-1)
        total = torch.where(self.top_k > 0, cumulative[..., -1:], 1.0)
        before = cumulative - ordered  # the probability of all more likely tokens
        is_outside = (before >= self.top_p * total) & (self.top_p < 1)
        is_outside[..., 0] = False
        return torch.zeros_like(probabilities_BV).scatter_(-1, ids, ordered.masked_fill_(is_outside, 0.0))

    def _sort(self, probabilities_BV: Tensor) -> tuple[Tensor, Tensor]:
        """Return all probabilities that top-k and top-p need in descending order, lower ids first, and their ids."""
        # On a GPU, reading the result of the check would wait for the device.
        if probabilities_BV.device.type == "cpu" and probabilities_BV.shape[-1] > 4 * _PARTIAL_SORT_SIZE:
            top = probabilities_BV.topk(_PARTIAL_SORT_SIZE)
            is_certain = top.values > top.values[:, -1:]  # the smallest may tie with tokens outside
            has_top_p = (self.top_p < 1) & ((top.values * is_certain).sum(-1, keepdim=True) >= self.top_p)
            if torch.where(self.top_k > 0, self.top_k <= is_certain.sum(-1, keepdim=True), has_top_p).all():
                ids = top.indices.sort(-1).values
                values, order = probabilities_BV.gather(-1, ids).sort(stable=True, dim=-1, descending=True)
                return values, ids.gather(-1, order)
        return probabilities_BV.sort(stable=True, dim=-1, descending=True)


class TokenScore(NamedTuple):
    """How likely a model finds a token."""

    logprob: float
    """Log-probability in nats, at temperature 1 and without edits of the logits."""
    alternatives: list[tuple[int, float]]
    """The most likely ids and their log-probabilities, the most likely first."""


def score_tokens(logits_NV: Tensor, ids_N: Tensor, num_alternatives: int) -> list[TokenScore]:
    """Return the scores of ``ids_N``, each with ``num_alternatives``, at most V."""
    logits_NV = logits_NV.float()
    normalizer_N1 = logits_NV.logsumexp(-1, keepdim=True)
    logprobs = (logits_NV.gather(-1, ids_N[:, None]) - normalizer_N1).squeeze(-1).tolist()
    if not num_alternatives:
        return [TokenScore(logprob, []) for logprob in logprobs]
    top = logits_NV.topk(min(num_alternatives, logits_NV.shape[-1]))
    alternatives = zip(top.indices.tolist(), (top.values - normalizer_N1).tolist(), strict=True)
    return [
        TokenScore(logprob, list(zip(*row, strict=True))) for logprob, row in zip(logprobs, alternatives, strict=True)
    ]
