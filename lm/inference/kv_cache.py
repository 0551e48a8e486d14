"""Cache of attention keys and values, so that each token is computed once.

The entries of a token lie at its position in the row of its sequence. Entries after a sequence's last token are never
read, so prompts of different lengths need no padding on the left.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.model.attention import AttentionFunction
from lm.model.config import ModelConfig
from lm.model.ops.causal_attention import causal_attention
from lm.model.transformer import TransformerLM

_QUERY_BLOCK = 256  # queries with one mask: its memory grows with the length, not with its square


class KVCache:
    """Keys and values (layers, rows, kv heads, length, K) of ``rows`` sequences of up to ``length`` tokens."""

    def __init__(
        self, config: ModelConfig, rows: int, length: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        shape = (config.num_layers, rows, config.kv_heads, length, config.head_width)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros_like(self.keys)

    def prefill_attention(self, rows: Tensor) -> list[AttentionFunction]:
        """Return each layer's attention for whole prompts (B, T), which fills ``rows`` (B,) of the cache."""

        def for_layer(keys: Tensor, values: Tensor) -> AttentionFunction:
            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                keys[rows, :, : k.shape[-2]] = k
                values[rows, :, : k.shape[-2]] = v
                return causal_attention(q, k, v)

            return attend

        return [for_layer(keys, values) for keys, values in zip(self.keys, self.values, strict=True)]

    def suffix_attention(self, rows: Tensor, positions: Tensor, lengths: Tensor) -> list[AttentionFunction]:
        """Return each layer's attention for tokens (B, T) that continue sequences in ``rows`` (B,) of the cache.

        The tokens are at ``positions`` (B, T). Of each sequence the first of ``lengths`` (B,) enter the cache; the
        others are padding.
        """
        steps = torch.arange(positions.shape[1], device=positions.device)
        batch, step = (steps < lengths[:, None]).nonzero(as_tuple=True)
        token_rows, token_positions = rows[batch], positions[batch, step]
        num_keys = int(token_positions.max()) + 1
        key_positions = torch.arange(num_keys, device=positions.device)

        def for_layer(keys: Tensor, values: Tensor) -> AttentionFunction:
            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                keys[token_rows, :, token_positions] = k[batch, :, step]
                values[token_rows, :, token_positions] = v[batch, :, step]
                all_keys, all_values = keys[rows, :, :num_keys], values[rows, :, :num_keys]
                has_groups = q.shape[1] > k.shape[1]
                outputs = []
                for queries, places in zip(q.split(_QUERY_BLOCK, -2), positions.split(_QUERY_BLOCK, -1), strict=True):
                    mask = key_positions <= places[:, None, :, None]  # (B, 1, block, S)
                    outputs.append(
                        F.scaled_dot_product_attention(queries, all_keys, all_values, mask, enable_gqa=has_groups)
                    )
                return torch.cat(outputs, -2)

            return attend

        return [for_layer(keys, values) for keys, values in zip(self.keys, self.values, strict=True)]

    def copy_rows(self, sources: list[int], targets: list[int]) -> None:
        """Copy the rows ``sources`` over the rows ``targets``."""
        for tensor in (self.keys, self.values):
            tensor[:, targets] = tensor[:, sources]


@dataclass(frozen=True)
class CachedAttention:
    """A layer's attention for one new token in each of the first B rows of the cache.

    ``keys`` and ``values`` (rows, kv heads, length, K) are the layer's cache. The new tokens are at ``positions`` (B,),
    whose maximum is ``max_position``. :mod:`lm.inference.cpu_decode` computes the same with CPU kernels.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    max_position: int

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``q`` (B, H, 1, K), ``k`` and ``v`` (B, kv heads, 1, K) → (B, H, 1, K)."""
        device, count = q.device, len(q)
        rows = torch.arange(count, device=device)
        self.keys[rows, :, self.positions], self.values[rows, :, self.positions] = k.squeeze(-2), v.squeeze(-2)
        keys, values = (x[:count, :, : self.max_position + 1] for x in (self.keys, self.values))
        mask = torch.arange(self.max_position + 1, device=device) <= self.positions[:, None, None, None]  # (B, 1, 1, S)
        queries = q.view(count, k.shape[1], -1, q.shape[-1])  # grouped by the kv head that they share
        return F.scaled_dot_product_attention(queries, keys, values, mask).view(q.shape)


def decode_step(model: TransformerLM, cache: KVCache, inputs: Tensor, max_position: int) -> Tensor:
    """Return logits (B, V) for one new token in each of the first B rows; ``inputs`` (2, B) are ids and positions."""
    ids, positions = inputs
    layers = zip(cache.keys, cache.values, strict=True)
    attention = [CachedAttention(*layer, positions, max_position) for layer in layers]
    return model.logits(model.hidden_states(ids[:, None], positions[:, None], attention).squeeze(1))
