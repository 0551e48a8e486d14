"""Decoding steps as CUDA graphs, because launching kernels one by one takes longer than computing a few rows.

A graph has fixed shapes, so the numbers of rows and keys are rounded up to powers of two. The extra keys are masked.
The extra rows are free rows of the cache, whose content does not matter.
"""

from typing import Any

import torch
from torch import Tensor

from lm.inference.gpu_step import GpuStep, GpuWeights, next_power_of_two
from lm.inference.kv_cache import KVCache, decode_step
from lm.model.transformer import TransformerLM

_MIN_KEYS = 64


class DecodeGraphs:
    """:class:`lm.inference.gpu_step.GpuStep`, where it can, or :func:`lm.inference.kv_cache.decode_step` as one graph
    for each shape, captured at its first use."""

    def __init__(self, model: TransformerLM, cache: KVCache) -> None:
        self._model, self._cache = model, cache
        _, self._rows, _, self._length, _ = cache.keys.shape
        self._inputs = torch.zeros(2, self._rows, dtype=torch.int64, device=cache.keys.device)
        weights = getattr(model, "gpu_weights", None)
        self._step = GpuStep(model, weights, cache) if isinstance(weights, GpuWeights) else None
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None  # shared memory: only one graph runs at a time

    def __call__(self, inputs: Tensor, max_position: int) -> Tensor:
        """Return logits (B, V) as ``decode_step`` does. The next call overwrites them."""
        count = inputs.shape[1]
        rows = min(next_power_of_two(count), self._rows)
        keys = min(max(_MIN_KEYS, next_power_of_two(max_position + 1)), self._length)
        self._inputs[:, :count] = inputs
        with torch.cuda.device_of(self._inputs):
            if (rows, keys) not in self._graphs:
                self._graphs[rows, keys] = self._capture(rows, keys)
            graph, logits = self._graphs[rows, keys]
            graph.replay()
        return logits[:count]

    def _compute(self, rows: int, keys: int) -> Tensor:
        inputs = self._inputs[:, :rows]
        if self._step is not None and rows <= self._step.max_rows:
            return self._step(inputs, keys - 1)
        return decode_step(self._model, self._cache, inputs, keys - 1)

    def _capture(self, rows: int, keys: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        side_stream = torch.cuda.Stream()
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            self._compute(rows, keys)  # warm-up: libraries allocate their workspaces
        torch.cuda.current_stream().wait_stream(side_stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread, such as one that prefetches batches, may allocate memory meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=side_stream, capture_error_mode="thread_local"):
            logits = self._compute(rows, keys)
        self._pool = graph.pool()
        return graph, logits
