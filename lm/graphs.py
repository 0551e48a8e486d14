"""Steps of one token more as CUDA graphs: recorded once, then launched as one.

For a few rows a GPU computes a kernel sooner than its host can launch the next. A graph has fixed shapes, so rows and
keys are as many as the next power of two: those keys are masked, and those rows are free ones of the cache, where
anything may be written.
"""

from typing import Any

import torch
from torch import Tensor

from lm.cache import KVCache, one_more
from lm.model import TransformerLM

_KEYS = 64  # at least


class DecodeGraphs:
    """:func:`lm.cache.one_more` for each number of rows and of keys, recorded when it is first wanted."""

    def __init__(self, model: TransformerLM, cache: KVCache) -> None:
        self._model, self._cache = model, cache
        _, self._rows, _, self._length, _ = cache.keys.shape
        self._inputs = torch.zeros(2, self._rows, dtype=torch.int64, device=cache.keys.device)
        self._recorded: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None  # the graphs' memory: only one runs at a time

    def __call__(self, inputs: Tensor, longest: int) -> Tensor:
        """As :func:`lm.cache.one_more`; the logits are there until the next call."""
        count = inputs.shape[1]
        rows = min(_power_of_two(count), self._rows)
        keys = min(max(_KEYS, _power_of_two(longest + 1)), self._length)
        self._inputs[:, :count] = inputs
        if (rows, keys) not in self._recorded:
            self._recorded[rows, keys] = self._record(rows, keys)
        graph, logits = self._recorded[rows, keys]
        graph.replay()
        return logits[:count]

    def _compute(self, rows: int, keys: int) -> Tensor:
        return one_more(self._model, self._cache, self._inputs[:, :rows], keys - 1)

    def _record(self, rows: int, keys: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self._compute(rows, keys)  # so that libraries have set up what they need
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._compute(rows, keys)
        self._pool = graph.pool()
        return graph, logits


def _power_of_two(number: int) -> int:
    """The least that is not less than ``number``."""
    return 1 << (number - 1).bit_length()
