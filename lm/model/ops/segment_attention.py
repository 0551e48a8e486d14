"""Causal attention within segments: for rows that hold several examples."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor


def make_segment_attention(segment_ids: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return an attention function for rows with ``segment_ids`` int (B, T), to use in each layer of a model.

    It maps queries (B, H, T, K) and keys and values (B, H', T, K) to (B, H, T, K); H / H' consecutive query heads share
    a key and value head. A token attends to itself and to the tokens before it with the same segment id.
    """
    length = segment_ids.shape[-1]
    is_same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    mask = is_same & is_same.new_ones(length, length).tril()  # (B, 1, T, T)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.shape[-3] > k.shape[-3])

    return attend
