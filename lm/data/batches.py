"""Batches of training sequences from a long sequence of token ids, and the shuffled order of training examples.

Source: CS336 assignment 1 (section 5.1).
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lm.common.errors import UserError

T = TypeVar("T")
Batch = tuple[Tensor, Tensor]  # inputs and targets, each (batch, context) int64


class TokenSequence(Protocol):
    """A one-dimensional array or memmap of token ids, or :class:`lm.data.token_shards.TokenShards`."""

    def __len__(self) -> int: ...
    def __getitem__(self, part: slice, /) -> Any: ...


def get_batch(
    tokens: TokenSequence,
    batch_size: int,
    context_length: int,
    device: str | torch.device,
    generator: np.random.Generator | None = None,
) -> Batch:
    """Draw a batch (x, y), each (batch_size, context_length) int64 on ``device``; y is x shifted by one token.

    Every valid start is equally likely. ``generator`` makes the draw repeatable. Raises UserError if there are at most
    ``context_length`` tokens.
    """
    check_length(tokens, context_length)
    generator = generator or np.random.default_rng()
    starts = generator.integers(0, len(tokens) - context_length, size=batch_size)
    return gather_batch(tokens, starts.tolist(), context_length, device)


def gather_batch(tokens: TokenSequence, starts: list[int], context_length: int, device: str | torch.device) -> Batch:
    """Return the batch (x, y) of the sequences at ``starts``, each (len(starts), context_length) int64."""

    def row(start: int) -> npt.NDArray[Any]:
        return np.asarray(tokens[start : start + context_length + 1])

    if getattr(tokens, "is_remote", False):  # wait for many requests at the same time
        with ThreadPoolExecutor(32) as pool:
            parts = list(pool.map(row, starts))
    else:
        parts = [row(start) for start in starts]
    rows = np.stack(parts).astype(np.int64)
    batch = torch.from_numpy(rows)
    if torch.device(device).type == "cuda":
        batch = batch.pin_memory()  # makes the copy asynchronous
    batch = batch.to(device, non_blocking=True)
    return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


def check_length(tokens: TokenSequence, context_length: int, name: str = "data", advice: str = "") -> None:
    """Raise UserError, which ends with ``advice``, if there are too few tokens for one sequence and its targets."""
    if len(tokens) <= context_length:
        raise UserError(
            f"The {name} has {len(tokens):,} tokens, too few for a context of {context_length:,} and its next token; "
            f"give more text or a smaller model.context_length{advice}."
        )


def batch_starts(
    length: int, batch_size: int, context_length: int, order: Literal["random", "shuffled_epochs"], seed: int, step: int
) -> list[int]:
    """Return the starts of the sequences of batch ``step`` (from 0) in ``length`` tokens. Depends on no other state.

    ``random``: uniform over all starts. ``shuffled_epochs``: each non-overlapping window of the tokens once per epoch,
    in an order that depends on the seed and the epoch; a batch may span two epochs.
    """
    if order == "random":
        generator = np.random.default_rng((seed, step))
        return generator.integers(0, length - context_length, size=batch_size).tolist()
    windows = (length - 1) // context_length
    starts = shuffled_indices(windows, step * batch_size, batch_size, seed) * context_length
    return starts.tolist()


def evenly_spaced_starts(length: int, context_length: int, sequences: int | None = None) -> list[int]:
    """Return the starts of the non-overlapping windows of ``length`` tokens: all, or ``sequences`` evenly spaced."""
    windows = (length - 1) // context_length
    chosen = np.linspace(0, windows - 1, min(sequences or windows, windows)).round().astype(int)
    return (np.unique(chosen) * context_length).tolist()


@contextmanager
def prefetch_batches(
    load: Callable[[int], T], first_step: int, device: torch.device | None = None
) -> Iterator[Callable[[int], T]]:
    """Wrap ``load(step)`` so that a thread loads the next batch ahead; call it with ``first_step``, then in order.

    On a GPU, copies to ``device`` run on a stream of their own, beside the training step.
    """
    stream = torch.cuda.Stream(device) if device is not None and device.type == "cuda" else None

    def load_on_stream(step: int) -> T:
        with torch.cuda.stream(stream):  # does nothing without a stream
            return load(step)

    with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
        next_batch = pool.submit(load_on_stream, first_step)

        def load_prefetched(step: int) -> T:
            nonlocal next_batch
            batch = next_batch.result()
            if stream is not None:
                current = torch.cuda.current_stream(device)
                current.wait_stream(stream)
                for tensor in tree_leaves(batch):  # its memory may be used again only after this step
                    tensor.record_stream(current)
            next_batch = pool.submit(load_on_stream, step + 1)
            return batch

        yield load_prefetched


def shuffled_indices(
    count: int,
    first: int,
    number: int,
    seed: int,
    permute: Callable[[int, int, int], npt.NDArray[np.int64]] | None = None,
) -> npt.NDArray[np.int64]:
    """Return the indices at the positions ``first`` to ``first + number`` of an endless list of shuffled epochs.

    An epoch has each of ``count`` indices once, in an order that ``seed`` and the number of the epoch decide.
    ``permute`` is a cache of :func:`permutation`; default: one that all callers share.
    """
    end, permute = first + number, permute or _last_permutations
    epochs = range(first // count, (end - 1) // count + 1)
    parts = [permute(seed, epoch, count)[max(0, first - epoch * count) : end - epoch * count] for epoch in epochs]
    return np.concatenate(parts)


def permutation(seed: int, epoch: int, count: int) -> npt.NDArray[np.int64]:
    """Return the order of ``count`` indices in an epoch, int64 (count,)."""
    return np.random.default_rng((seed, epoch)).permutation(count)


_last_permutations = lru_cache(maxsize=2)(permutation)  # a batch may span two epochs
