"""Keys and values of the tokens that a model has seen, so that each token is computed once.

A token's keys and values lie at its position in its sequence's row. What lies behind a sequence's last token is never
looked at, so prompts of different lengths need no padding to one side: later tokens overwrite it.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.fused import causal_attention
from lm.layers import Attend
from lm.model import ModelConfig, TransformerLM


class KVCache:
    """``rows`` sequences of up to ``length`` tokens: keys and values (layers, rows, kv heads, length, K)."""

    def __init__(
        self, config: ModelConfig, rows: int, length: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        shape = (config.num_layers, rows, config.kv_heads, length, config.d_model // config.num_heads)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros_like(self.keys)

    def prefill(self, rows: Tensor) -> list[Attend]:
        """Each layer's attention within whole prompts (B, T), whose keys and values go to the start of ``rows``
        (B,)."""

        def of_layer(keys: Tensor, values: Tensor) -> Attend:
            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                keys[rows, :, : k.shape[-2]] = k
                values[rows, :, : k.shape[-2]] = v
                return causal_attention(q, k, v)

            return attend

        return [of_layer(keys, values) for keys, values in zip(self.keys, self.values, strict=True)]

    def decode(self, positions: Tensor, longest: int) -> "list[OneMore]":
        """Each layer's attention of one token more in the first rows, at ``positions`` (B,), the greatest of which is
        ``longest``."""
        return [OneMore(*layer, positions, longest) for layer in zip(self.keys, self.values, strict=True)]

    def copy(self, sources: list[int], rows: list[int]) -> None:
        """Overwrite ``rows`` by the rows ``sources``."""
        for store in (self.keys, self.values):
            store[:, rows] = store[:, sources]


@dataclass(frozen=True)
class OneMore:
    """A layer's attention of one token more in each of the first rows of ``keys`` and ``values`` (rows, kv heads,
    length, K), at ``positions`` (B,), the greatest of which is ``longest``. Kernels do it in :mod:`lm.decode`."""

    keys: Tensor
    values: Tensor
    positions: Tensor
    longest: int

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``q`` (B, H, 1, K), ``k`` and ``v`` (B, kv heads, 1, K) → (B, H, 1, K)."""
        device, count = q.device, len(q)
        rows = torch.arange(count, device=device)
        self.keys[rows, :, self.positions], self.values[rows, :, self.positions] = k.squeeze(-2), v.squeeze(-2)
        keys, values = (x[:count, :, : self.longest + 1] for x in (self.keys, self.values))
        mask = torch.arange(self.longest + 1, device=device) <= self.positions[:, None, None, None]  # (B, 1, 1, S)
        queries = q.view(count, k.shape[1], -1, q.shape[-1])  # those that share keys together
        return F.scaled_dot_product_attention(queries, keys, values, mask).view(q.shape)


def one_more(model: TransformerLM, cache: KVCache, inputs: Tensor, longest: int) -> Tensor:
    """Ids and their positions (2, B), the greatest of which is ``longest``, in the cache's first rows → logits of what
    follows (B, V)."""
    ids, positions = inputs
    attend = cache.decode(positions, longest)
    return model.logits(model.hidden(ids[:, None], positions[:, None], attend).squeeze(1))
