"""The order of training examples: each epoch has all of them in a new order."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt


def shuffled_indices(count: int, first: int, number: int, seed: int) -> npt.NDArray[np.int64]:
    """Return the indices at the places ``first`` to ``first + number`` of an endless list of shuffled epochs.

    An epoch has each of ``count`` indices once, in an order that ``seed`` and the number of the epoch decide.
    """
    end = first + number
    epochs = range(first // count, (end - 1) // count + 1)
    parts = [_permutation(seed, epoch, count)[max(0, first - epoch * count) : end - epoch * count] for epoch in epochs]
    return np.concatenate(parts)


@lru_cache(maxsize=2)  # a batch may span two epochs
def _permutation(seed: int, epoch: int, count: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(count)
