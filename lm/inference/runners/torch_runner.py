"""The reference runner: torch's operators, on any device and for any model.

Shapes: B sequences, R rows of the cache, T new tokens of a sequence, N new tokens of all, S keys, H query heads,
G key and value heads, K head_dim, D d_model, V vocabulary.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.inference.kv_cache import KVCache, Tokens
from lm.model.attention import AttentionFunction
from lm.model.ops.causal_attention import causal_attention
from lm.model.transformer import TransformerLM

_QUERY_BLOCK = 256  # queries with one mask: its memory grows with the length, not with its square


class TorchRunner:
    """Computes new tokens of ``model`` with torch's operators; see :class:`lm.inference.runners.runner.Runner`."""

    def __init__(self, model: TransformerLM, cache: KVCache) -> None:
        self.model, self.cache = model, cache

    def decode(self, inputs_2B: Tensor, max_position: int) -> Tensor:
        """Return logits (B, V) of one new token in each of the first B rows."""
        ids_B, positions_B = inputs_2B
        layers = zip(self.cache.keys, self.cache.values, strict=True)
        attention = [DecodeAttention(*layer, positions_B, max_position) for layer in layers]
        hidden_B1D = self.model.hidden_states(ids_B[:, None], positions_B[:, None], attention)
        return self.model.logits(hidden_B1D.squeeze(1))

    def extend(self, rows: Sequence[int], tokens: Sequence[Tokens], starts: Sequence[int]) -> list[Tensor]:
        """Compute new tokens of several sequences at once, padded, and return their hidden states (T, D)."""
        lengths, device = [len(new) for new in tokens], self.cache.keys.device
        longest = max(lengths)
        ids_BT = torch.tensor([[*new, *[0] * (longest - len(new))] for new in tokens], device=device)
        rows_B = torch.tensor(rows, device=device)
        if any(starts):
            positions_BT = torch.tensor(starts, device=device)[:, None] + torch.arange(longest, device=device)
            attention = _suffix_attention(self.cache, rows_B, positions_BT, torch.tensor(lengths, device=device))
            last_position = self.model.config.context_length - 1  # of padding, whose result is not used
            hidden_BTD = self.model.hidden_states(ids_BT, positions_BT.clamp(max=last_position), attention)
        else:  # whole sequences have a faster attention
            hidden_BTD = self.model.hidden_states(ids_BT, None, _prefill_attention(self.cache, rows_B))
        return [hidden_TD[:length] for hidden_TD, length in zip(hidden_BTD, lengths, strict=True)]

    def sampling_context(self, batch_size: int) -> AbstractContextManager[None]:
        """Return the context in which to sample from logits (batch_size, V)."""
        return nullcontext()


@dataclass(frozen=True)
class DecodeAttention:
    """A layer's attention for one new token in each of the first B rows of the cache.

    ``keys_RGSK`` and ``values_RGSK`` are the layer's cache. The new tokens are at ``positions_B``; the maximum is
    ``max_position``. :mod:`lm.inference.runners.cpu_layers` computes the same with CPU kernels.
    """

    keys_RGSK: Tensor
    values_RGSK: Tensor
    positions_B: Tensor
    max_position: int

    def __call__(self, q_BH1K: Tensor, k_BG1K: Tensor, v_BG1K: Tensor) -> Tensor:
        """Store the new keys and values, and return the attention (B, H, 1, K)."""
        device, count = q_BH1K.device, len(q_BH1K)
        rows_B = torch.arange(count, device=device)
        self.keys_RGSK[rows_B, :, self.positions_B] = k_BG1K.squeeze(-2)
        self.values_RGSK[rows_B, :, self.positions_B] = v_BG1K.squeeze(-2)
        keys_BGSK, values_BGSK = (x[:count, :, : self.max_position + 1] for x in (self.keys_RGSK, self.values_RGSK))
        mask_B11S = torch.arange(self.max_position + 1, device=device) <= self.positions_B[:, None, None, None]
        # The queries that share a key and value head are one more axis: no copy of the keys for each head.
        grouped_q = q_BH1K.view(count, k_BG1K.shape[1], -1, q_BH1K.shape[-1])
        return F.scaled_dot_product_attention(grouped_q, keys_BGSK, values_BGSK, mask_B11S).view(q_BH1K.shape)


def _prefill_attention(cache: KVCache, rows_B: Tensor) -> list[AttentionFunction]:
    """Return each layer's attention for whole sequences (B, T), which fills ``rows_B`` of the cache."""

    def attend(keys_RGSK: Tensor, values_RGSK: Tensor, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
        keys_RGSK[rows_B, :, : k_BGTK.shape[-2]] = k_BGTK
        values_RGSK[rows_B, :, : k_BGTK.shape[-2]] = v_BGTK
        return causal_attention(q_BHTK, k_BGTK, v_BGTK)

    return [partial(attend, *layer) for layer in zip(cache.keys, cache.values, strict=True)]


def _suffix_attention(
    cache: KVCache, rows_B: Tensor, positions_BT: Tensor, lengths_B: Tensor
) -> list[AttentionFunction]:
    """Return each layer's attention for tokens at ``positions_BT`` that continue sequences in ``rows_B`` of the cache.

    Of each sequence the first of ``lengths_B`` enter the cache; the others are padding.
    """
    steps_T = torch.arange(positions_BT.shape[1], device=positions_BT.device)
    batch_N, step_N = (steps_T < lengths_B[:, None]).nonzero(as_tuple=True)
    rows_N, positions_N = rows_B[batch_N], positions_BT[batch_N, step_N]
    num_keys = int(positions_N.max()) + 1
    key_positions_S = torch.arange(num_keys, device=positions_BT.device)

    def attend(keys_RGSK: Tensor, values_RGSK: Tensor, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
        keys_RGSK[rows_N, :, positions_N] = k_BGTK[batch_N, :, step_N]
        values_RGSK[rows_N, :, positions_N] = v_BGTK[batch_N, :, step_N]
        keys_BGSK, values_BGSK = keys_RGSK[rows_B, :, :num_keys], values_RGSK[rows_B, :, :num_keys]
        has_groups = q_BHTK.shape[1] > k_BGTK.shape[1]
        outputs = []
        for q, positions in zip(q_BHTK.split(_QUERY_BLOCK, -2), positions_BT.split(_QUERY_BLOCK, -1), strict=True):
            mask = key_positions_S <= positions[:, None, :, None]  # (B, 1, block, S)
            outputs.append(F.scaled_dot_product_attention(q, keys_BGSK, values_BGSK, mask, enable_gqa=has_groups))
        return torch.cat(outputs, -2)

    return [partial(attend, *layer) for layer in zip(cache.keys, cache.values, strict=True)]
