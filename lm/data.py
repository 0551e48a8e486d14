"""Batches of training sequences out of a long sequence of token ids.

Source: CS336 assignment 1 (section 5.1).
"""

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lm.errors import UserError


class Tokens(Protocol):
    """What batches are drawn from: a one-dimensional array, memmap, or :class:`lm.shards.TokenShards`."""

    def __len__(self) -> int: ...
    def __getitem__(self, part: slice, /) -> Any: ...


def get_batch(
    tokens: Tokens,
    batch_size: int,
    context_length: int,
    device: str | torch.device,
    generator: np.random.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw (x, y), each (batch_size, context_length) int64 on ``device``; y is x one token later.

    Sequences start uniformly at random, every valid start included. ``generator`` makes the draw repeatable. Raises
    UserError when there are not more tokens than ``context_length``.
    """
    check_length(tokens, context_length)
    generator = generator or np.random.default_rng()
    starts = generator.integers(0, len(tokens) - context_length, size=batch_size)
    return windows(tokens, starts.tolist(), context_length, device)


def check_length(tokens: Tokens, context_length: int, what: str = "data") -> None:
    """Raise UserError when not even one sequence and its next token can be drawn."""
    if len(tokens) <= context_length:
        raise UserError(
            f"The {what} has {len(tokens):,} tokens, too few for a context of {context_length:,} and its next token; "
            "give more text or a smaller model.context_length."
        )


def windows(
    tokens: Tokens, starts: list[int], context_length: int, device: str | torch.device
) -> tuple[Tensor, Tensor]:
    """The sequences at ``starts``, and the same one token later; each (len(starts), context_length) int64."""
    rows = np.stack([np.asarray(tokens[i : i + context_length + 1]) for i in starts]).astype(np.int64)
    both = torch.from_numpy(rows)
    if torch.device(device).type == "cuda":
        both = both.pin_memory()  # lets the copy run beside the computation
    both = both.to(device, non_blocking=True)
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()
