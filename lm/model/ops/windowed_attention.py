"""Causal attention with a sliding window (Beltagy et al. 2020) and a soft-cap of scores (Gemma Team 2024).

Blocks of queries read the keys of their windows alone. The plain reference is
:func:`lm.model.ops.causal_attention.reference_attention`.
Shapes: B batch, H query heads, G key and value heads, T queries, S keys, K head_dim.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_MIN_BLOCK, _MAX_BLOCK = 128, 512  # queries: a block reads the keys of a window and as many more


class AttentionRule(NamedTuple):
    """What a token attends to, and how: the part of attention that fused forms do not have."""

    window: int | None = None
    """Tokens that a token attends to, itself included. None: all before it."""
    softcap: float = 0.0
    """Scores are limited to ± this value; 0: they are not."""

    def is_plain(self, length: int) -> bool:
        """Return whether ``length`` tokens have plain causal attention."""
        return not self.softcap and (self.window is None or self.window >= length)

    def allows(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Return bool, whether keys are neither after the queries nor before their windows. Positions broadcast."""
        is_past = key_positions <= query_positions
        return is_past if self.window is None else is_past & (key_positions > query_positions - self.window)


PLAIN = AttentionRule()


def _blocks(length: int, rule: AttentionRule) -> list[tuple[slice, slice]]:
    """Return the queries of each block and the keys that it reads."""
    window = min(rule.window or length, length)
    size = min(max(window, _MIN_BLOCK), _MAX_BLOCK)
    starts = range(0, length, size)
    return [
        (slice(start, min(start + size, length)), slice(max(0, start - window + 1), min(start + size, length)))
        for start in starts
    ]


def count_scores(length: int, rule: AttentionRule) -> int:
    """Return the number of scores of a head that :func:`windowed_attention` computes; 0 if ``rule`` is plain."""
    if rule.is_plain(length):
        return 0
    return sum((rows.stop - rows.start) * (keys.stop - keys.start) for rows, keys in _blocks(length, rule))


def windowed_attention(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, rule: AttentionRule) -> Tensor:
    """Return causal attention by ``rule``: (B, H, T, K)."""
    length = q_BHTK.shape[-2]
    positions_T = torch.arange(length, device=q_BHTK.device)
    outputs = []
    for queries, keys in _blocks(length, rule):
        mask_TS = rule.allows(positions_T[queries, None], positions_T[keys])
        k, v = k_BGTK[..., keys, :], v_BGTK[..., keys, :]
        outputs.append(masked_attention(q_BHTK[..., queries, :], k, v, mask_TS, rule.softcap))
    return torch.cat(outputs, -2)


def masked_attention(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Tensor, softcap: float = 0.0) -> Tensor:
    """Return the attention (B, H, T, K) to the keys where ``mask`` bool, (B, 1, T, S) or less, is true."""
    groups = q_BHTK.shape[-3] // k_BGSK.shape[-3]
    if not softcap:
        return F.scaled_dot_product_attention(q_BHTK, k_BGSK, v_BGSK, mask, enable_gqa=groups > 1)
    if groups > 1:
        k_BGSK, v_BGSK = (x.repeat_interleave(groups, -3) for x in (k_BGSK, v_BGSK))
    scores = (q_BHTK @ k_BGSK.mT).to(torch.promote_types(q_BHTK.dtype, torch.float32)) * q_BHTK.shape[-1] ** -0.5
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~mask, float("-inf"))
    return scores.softmax(-1).to(v_BGSK.dtype) @ v_BGSK
