"""How the next token is drawn from a model's logits.

Sources: CS336 assignment 1 (section 6); Fan et al. 2018 (top-k); Holtzman et al. 2020 (top-p); Nguyen et al. 2024
(min-p); Keskar et al. 2019 (repetition penalty).
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lm.bounds import FORM, bounded, check_bounds
from lm.layers import softmax

_FEW = 512  # of the likeliest tokens: mostly enough for top-k and top-p, and found faster than all are sorted


@dataclass(frozen=True)
class SampleConfig:
    """How tokens are drawn, and which texts are gone on with."""

    __pydantic_config__ = FORM

    temperature: float = bounded(0.8, ge=0, lt=math.inf)
    """Divides the logits: below 1 safer, above 1 wilder, 0 always the likeliest token."""
    top_k: int = bounded(0, ge=0)
    """Draws among this many likeliest tokens; 0 for all."""
    top_p: float = bounded(0.95, ge=0, le=1)
    """Draws among the likeliest tokens that together have at least this probability; 1 for all."""
    min_p: float = bounded(0.0, ge=0, le=1)
    """Draws among the tokens that have at least this part of the likeliest one's probability; 0 for all."""
    repetition_penalty: float = bounded(1.0, gt=0, lt=math.inf)
    """Makes tokens that are there already less likely: their logits are divided by it, or times it if negative."""
    prompts: list[str] = field(default_factory=lambda: ["Once upon a time", "One day", "The little"])
    """Texts to go on from. Special tokens in them are plain text."""
    max_new_tokens: int = bounded(200, ge=0)
    """Most tokens to add to a prompt."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a sample where they appear in it; they are not part of it."""
    samples: int = bounded(1, ge=1)
    """Samples of each prompt."""
    seed: int = 0
    """Seed of the draws; sample number i, counted over all prompts, draws with seed + i."""

    def __post_init__(self) -> None:
        check_bounds(self, "sample")


class Drawing:
    """The settings of the rows of a batch, as tensors (B, 1), and draws by them."""

    def __init__(self, rows: list[SampleConfig], device: torch.device) -> None:
        def column(name: str) -> Tensor:
            return torch.tensor([[getattr(row, name)] for row in rows], dtype=torch.float32, device=device)

        self.temperature, self.top_k, self.top_p, self.min_p, self.penalty = map(
            column, ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        )
        self.is_greedy = all(row.temperature < torch.finfo(torch.float32).tiny for row in rows)
        self.is_cut = any(row.top_k or row.top_p < 1 for row in rows)
        self.has_floor = any(row.min_p > 0 for row in rows)
        self.has_penalty = any(row.repetition_penalty != 1 for row in rows)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Probabilities (B, V) that the next tokens are drawn with, from logits (B, V).

        The temperature comes first, then top-k, top-p of what is left, min-p. The likeliest token always stays. With
        the temperature 0 it alone does. Where every logit is -inf, all tokens are as likely.
        """
        greedy = torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        if self.is_greedy:
            return greedy
        # As infinite as a penalty near 0 or a broken model may make them, something is drawn.
        logits = logits.float().nan_to_num(-math.inf, torch.finfo(torch.float32).max, -math.inf)
        greatest = logits.amax(-1, keepdim=True)
        logits = (logits - greatest).masked_fill(greatest == -math.inf, 0.0)
        tiny = torch.finfo(torch.float32).tiny
        probabilities = softmax(logits / self.temperature.clamp(min=tiny))
        if self.is_cut:
            probabilities = self._cut(probabilities)
        if self.has_floor:
            floor = self.min_p * probabilities.amax(-1, keepdim=True)
            probabilities = probabilities.masked_fill(probabilities < floor, 0.0)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return torch.where(self.temperature < tiny, greedy, probabilities)

    def _cut(self, probabilities: Tensor) -> Tensor:
        """Top-k and top-p: the smallest set of the ``top_k`` likeliest with ``top_p`` of their probability."""
        ordered, order = self._in_order(probabilities)
        rank = torch.arange(ordered.shape[-1], device=ordered.device)
        ordered = ordered.masked_fill((rank >= self.top_k) & (self.top_k > 0), 0.0)
        upto = ordered.cumsum(-1)
        left = torch.where(self.top_k > 0, upto[..., -1:], 1.0)
        before = upto - ordered  # the probability of all likelier tokens
        outside = (before >= self.top_p * left) & (self.top_p < 1)
        outside[..., 0] = False
        return torch.zeros_like(probabilities).scatter_(-1, order, ordered.masked_fill_(outside, 0.0))

    def _in_order(self, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities from the greatest on, of equal ones the lower id first, and their ids: as many as every row
        needs, or all."""
        if probabilities.device.type == "cpu" and probabilities.shape[-1] > 4 * _FEW:  # elsewhere a look would wait
            few = probabilities.topk(_FEW)
            is_sure = few.values > few.values[:, -1:]  # others may be as likely as the last ones
            has_mass = (self.top_p < 1) & ((few.values * is_sure).sum(-1, keepdim=True) >= self.top_p)
            if torch.where(self.top_k > 0, self.top_k <= is_sure.sum(-1, keepdim=True), has_mass).all():
                ids = few.indices.sort(-1).values
                values, places = probabilities.gather(-1, ids).sort(stable=True, dim=-1, descending=True)
                return values, ids.gather(-1, places)
        return probabilities.sort(stable=True, dim=-1, descending=True)

    def draw(self, logits: Tensor, uniform: Tensor, seen: Tensor | None = None) -> Tensor:
        """Ids (B,) of the next tokens, by numbers ``uniform`` (B,) in (0, 1]: the first id up to which the
        probabilities add up to as much. ``seen`` (B, V) says which tokens the penalty is for."""
        if seen is not None:
            logits = torch.where(seen, torch.where(logits > 0, logits / self.penalty, logits * self.penalty), logits)
        if self.is_greedy:
            return logits.argmax(-1)
        upto = self.probabilities(logits).cumsum(-1)
        return torch.searchsorted(upto, uniform[:, None].to(upto) * upto[:, -1:]).squeeze(-1)


def log_probabilities(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities, in nats, of ``ids`` (...) under the model itself, whatever the sampling: logits (..., V)."""
    logits = logits.float()
    return logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
