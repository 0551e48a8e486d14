"""Batches of training sequences out of a long sequence of token ids.

Source: CS336 assignment 1 (section 5.1).
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from lm.errors import UserError

Batch = tuple[Tensor, Tensor]  # ids (batch, context) and the same one token later, int64


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
) -> Batch:
    """Draw (x, y), each (batch_size, context_length) int64 on ``device``; y is x one token later.

    Sequences start uniformly at random, every valid start included. ``generator`` makes the draw repeatable. Raises
    UserError when there are not more tokens than ``context_length``.
    """
    check_length(tokens, context_length)
    generator = generator or np.random.default_rng()
    starts = generator.integers(0, len(tokens) - context_length, size=batch_size)
    return windows(tokens, starts.tolist(), context_length, device)


def batch_starts(
    length: int, batch_size: int, context_length: int, order: Literal["random", "epochs"], seed: int, step: int
) -> list[int]:
    """Where the sequences of the batch of ``step`` (from 0) start in ``length`` tokens: a function of these alone.

    ``random`` draws uniformly out of all starts. ``epochs`` cuts the tokens into whole windows and takes each once an
    epoch, in an order of the seed and the epoch; a batch may end one epoch and begin the next.
    """
    if order == "random":
        draws = np.random.default_rng((seed, step))
        return draws.integers(0, length - context_length, size=batch_size).tolist()
    count = (length - 1) // context_length
    epochs, places = np.divmod(np.arange(step * batch_size, (step + 1) * batch_size), count)
    return [
        int(_permutation(seed, int(epoch), count)[i]) * context_length for epoch, i in zip(epochs, places, strict=True)
    ]


@lru_cache(maxsize=2)  # a batch may lie in two epochs
def _permutation(seed: int, epoch: int, count: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
    return np.random.default_rng((seed, epoch)).permutation(count)


@contextmanager
def prefetched(make: Callable[[int], Batch], first: int) -> Iterator[Callable[[int], Batch]]:
    """Within it, the function given returns ``make(step)`` for the steps from ``first`` on, in order; a thread makes
    the next one meanwhile."""
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
        waiting = [pool.submit(make, first)]

        def take(step: int) -> Batch:
            batch = waiting.pop().result()
            waiting.append(pool.submit(make, step + 1))
            return batch

        yield take


def check_length(tokens: Tokens, context_length: int, what: str = "data") -> None:
    """Raise UserError when not even one sequence and its next token can be drawn."""
    if len(tokens) <= context_length:
        raise UserError(
            f"The {what} has {len(tokens):,} tokens, too few for a context of {context_length:,} and its next token; "
            "give more text or a smaller model.context_length."
        )


def windows(tokens: Tokens, starts: list[int], context_length: int, device: str | torch.device) -> Batch:
    """The sequences at ``starts``, and the same one token later; each (len(starts), context_length) int64."""
    rows = np.stack([np.asarray(tokens[i : i + context_length + 1]) for i in starts]).astype(np.int64)
    both = torch.from_numpy(rows)
    if torch.device(device).type == "cuda":
        both = both.pin_memory()  # lets the copy run beside the computation
    both = both.to(device, non_blocking=True)
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()
